// Views of the cache's tensors, and the cut of a push, shared by the ops that move rows.
#pragma once

#include <cstring>
#include <vector>

#include "core/cache_set.h"
#include "ops/cpu/tensors.h"

namespace hetrec {

constexpr int64_t kAhead = 8;  // rows prefetched ahead of their use

// kWrite 1: the values will be written.
template <int kWrite>
void prefetch_floats(const float* at, int64_t n) {
  const auto* last = reinterpret_cast<const char*>(at + n - 1);
  for (const auto* byte = reinterpret_cast<const char*>(at); byte < last; byte += 64) __builtin_prefetch(byte, kWrite);
  __builtin_prefetch(last, kWrite);
}

struct Slots {
  SlotMeta* meta;
  float* rows;
  int64_t n;      // slots, spill rows included
  int64_t width;  // R

  Slots(const Tensor& meta_t, const Tensor& rows_t)
      : meta(reinterpret_cast<SlotMeta*>(data<int64_t>(meta_t, "meta"))),
        rows(data<float>(rows_t, "rows")),
        n(meta_t.size(0)),
        width(rows_t.size(2)) {
    STD_TORCH_CHECK(meta_t.dim() == 2 && meta_t.size(1) == 4, "meta must be (slots, 4)");
    STD_TORCH_CHECK(rows_t.dim() == 3 && rows_t.size(0) == n && rows_t.size(1) == 2, "rows must be (slots, 2, R)");
  }

  float* values(int64_t slot) const { return rows + slot * 2 * width; }
  float* deltas(int64_t slot) const { return values(slot) + width; }
  void prefetch(int64_t slot) const {
    __builtin_prefetch(meta + slot, 1);
    prefetch_floats<1>(values(slot), 2 * width);
  }
};

// The tensors of a push.
struct Push {
  Tensor keys, tables, starts, clocks, deltas;
};

// Copies the pending deltas of `from` out and zeroes them in the slot, so that nothing is applied twice. Slots without
// pending updates must not be passed.
inline Push cut_push(const Slots& slots, const std::vector<int64_t>& from) {
  const auto n = static_cast<int64_t>(from.size());
  Push push{empty<int64_t>({n}), empty<int32_t>({n}), empty<int64_t>({n}), empty<int64_t>({n}),
            empty<float>({n, slots.width})};
  auto* keys = data<int64_t>(push.keys, "keys");
  auto* tables = data<int32_t>(push.tables, "tables");
  auto* starts = data<int64_t>(push.starts, "starts");
  auto* clocks = data<int64_t>(push.clocks, "clocks");
  auto* deltas = data<float>(push.deltas, "deltas");
  const size_t bytes = sizeof(float) * static_cast<size_t>(slots.width);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch_floats<1>(slots.deltas(from[static_cast<size_t>(i + kAhead)]), slots.width);
    const int64_t slot = from[static_cast<size_t>(i)];
    SlotMeta& meta = slots.meta[slot];
    keys[i] = meta.key;
    tables[i] = meta.table;
    starts[i] = meta.start_clock;
    clocks[i] = meta.start_clock + meta.pending;
    std::memcpy(deltas + i * slots.width, slots.deltas(slot), bytes);
    std::memset(slots.deltas(slot), 0, bytes);
    meta.start_clock += meta.pending;
    meta.pending = 0;
  }
  return push;
}

}  // namespace hetrec
