#include "table/residuals.h"

#include <algorithm>
#include <cstddef>

namespace hetrec {

void Residuals::encode(const PushView& push, const int64_t* places, uint8_t* out) {
  const int64_t dim = this->dim(), state_dim = this->state_dim(), width = dim + state_dim;
  const int64_t bytes = encoded_row_bytes(codec_, dim, state_dim);
  std::vector<float> sum(static_cast<size_t>(width)), decoded(static_cast<size_t>(width));
  errors_.change(push.n, push.tables, push.keys, [&](int64_t i, float* error, bool created) {
    const float* delta = push.deltas + (places == nullptr ? i : places[i]) * width;
    if (created) std::fill_n(error, width, 0.f);
    for (int64_t d = 0; d < width; ++d) sum[static_cast<size_t>(d)] = delta[d] + error[d];
    encode_row(codec_, sum.data(), dim, state_dim, out + i * bytes);
    decode_row(codec_, out + i * bytes, dim, state_dim, decoded.data());
    for (int64_t d = 0; d < width; ++d) error[d] = sum[static_cast<size_t>(d)] - decoded[static_cast<size_t>(d)];
  });
}

Residuals::Kept Residuals::drain() {
  const auto width = static_cast<size_t>(errors_.width());
  Kept kept;
  std::vector<int64_t> clocks;
  for (int64_t bucket = 0; bucket < kBuckets; ++bucket) {
    const size_t before = kept.keys.size(), n = static_cast<size_t>(errors_.bucket_size(bucket));
    kept.tables.resize(before + n);
    kept.keys.resize(before + n);
    kept.rows.resize((before + n) * width);
    clocks.resize(n);
    errors_.export_bucket(bucket, kept.tables.data() + before, kept.keys.data() + before, clocks.data(),
                          kept.rows.data() + before * width);
    size_t end = before;
    for (size_t row = before; row < before + n; ++row) {
      const float* values = kept.rows.data() + row * width;
      if (std::all_of(values, values + width, [](float x) { return x == 0.f; })) continue;
      kept.tables[end] = kept.tables[row];
      kept.keys[end] = kept.keys[row];
      if (end != row) std::copy_n(values, width, kept.rows.data() + end * width);
      ++end;
    }
    kept.tables.resize(end);
    kept.keys.resize(end);
    kept.rows.resize(end * width);
  }
  errors_.clear();
  return kept;
}

}  // namespace hetrec
