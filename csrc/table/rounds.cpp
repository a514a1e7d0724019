#include "table/rounds.h"

#include <bit>

namespace hetrec {

namespace {

// Distinct rows in order of first occurrence, with the sum of their gradients and the number of ranks that had one.
class Sums {
 public:
  Sums(int64_t dim, int64_t most)
      : dim_(dim), mask_(std::bit_ceil(static_cast<uint64_t>(2 * most + 1)) - 1), index_(mask_ + 1, -1) {}

  void add(int64_t rank, int32_t table, int64_t key, uint64_t hash, const float* gradient) {
    uint64_t at = hash & mask_;  // the low bits: the high ones choose the bucket
    for (; index_[at] >= 0; at = (at + 1) & mask_) {
      const auto row = static_cast<size_t>(index_[at]);
      if (keys[row] != key || tables[row] != table) continue;
      float* __restrict__ sum = gradients.data() + static_cast<int64_t>(row) * dim_;
      for (int64_t d = 0; d < dim_; ++d) sum[d] += gradient[d];
      if (last_rank_[row] != rank) ++ranks[row];
      last_rank_[row] = rank;
      return;
    }
    index_[at] = static_cast<int64_t>(keys.size());
    tables.push_back(table);
    keys.push_back(key);
    ranks.push_back(1);
    last_rank_.push_back(rank);
    gradients.insert(gradients.end(), gradient, gradient + dim_);
  }

  std::vector<int32_t> tables;
  std::vector<int64_t> keys;
  std::vector<int64_t> ranks;
  std::vector<float> gradients;

 private:
  int64_t dim_;
  uint64_t mask_;
  std::vector<int64_t> index_;
  std::vector<int64_t> last_rank_;
};

}  // namespace

void step_rows(EmbeddingTable& table, const std::vector<GradientView>& shares, float lr,
               const OptimizerSettings& settings, const uint8_t* skip) {
  int64_t most = 0;
  for (const GradientView& share : shares) {
    table.require_declared(share.n, share.tables);
    most += share.n;
  }
  Sums sums(table.dim(), most);
  for (const GradientView& share : shares) {
    for (int64_t i = 0; i < share.n; ++i) {
      const uint64_t hash = hash_row(share.tables[i], share.keys[i]);
      if (skip != nullptr && skip[bucket_of(hash)]) continue;
      sums.add(share.rank, share.tables[i], share.keys[i], hash, share.gradients + i * table.dim());
    }
  }
  table.step({static_cast<int64_t>(sums.keys.size()), sums.tables.data(), sums.keys.data(), sums.ranks.data(),
              sums.gradients.data()},
             lr, settings);
}

}  // namespace hetrec
