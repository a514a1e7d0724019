// cache_cut, cache_answered, cache_commit, cache_release, init_rows: the cache's side of an exchange with the store.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "core/init.h"
#include "ops/cpu/slots.h"

namespace hetrec {
namespace {

class Inits {
 public:
  Inits(const Tensor& seeds, const Tensor& values)
      : seeds_(data<const int64_t>(seeds, "init_seeds")),
        values_(data<const float>(values, "init_values")),
        n_(seeds.numel()) {
    STD_TORCH_CHECK(values.dim() == 2 && values.size(0) == n_ && values.size(1) == 3,
                    "init_values must be (tables, 3)");
  }
  RowInit at(int32_t table) const {
    STD_TORCH_CHECK(table >= 0 && table < n_, "table id ", table, " has no initial rows; ", n_, " tables are known");
    return {static_cast<uint64_t>(seeds_[table]), values_[3 * table], values_[3 * table + 1], values_[3 * table + 2]};
  }

 private:
  const int64_t* seeds_;
  const float* values_;
  int64_t n_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cache_cut(Tensor meta_t, Tensor rows_t,
                                                                     const Tensor& slots_t) {
  const Slots slots(meta_t, rows_t);
  const auto* slot = data<const int64_t>(slots_t, "slots");
  std::vector<int64_t> from;
  std::vector<int32_t> selected;
  for (int64_t i = 0; i < slots_t.numel(); ++i) {
    if (slots.meta[slot[i]].pending == 0) continue;
    from.push_back(slot[i]);
    selected.push_back(static_cast<int32_t>(i));
  }
  const Push push = cut_push(slots, from);
  return {from_values(selected.data(), static_cast<int64_t>(selected.size())),
          push.keys,
          push.tables,
          push.starts,
          push.clocks,
          push.deltas};
}

void cache_answered(Tensor meta_t, const Tensor& slots_t, const Tensor& which_t) {
  auto* meta = reinterpret_cast<SlotMeta*>(data<int64_t>(meta_t, "meta"));
  const auto* slot = data<const int64_t>(slots_t, "slots");
  const auto* which = data<const int32_t>(which_t, "which");
  const int64_t n = which_t.numel();
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(meta + slot[which[i + kAhead]], 1);
    --meta[slot[which[i]]].answers_due;
  }
}

void cache_commit(Tensor meta_t, Tensor rows_t, const Tensor& slots_t, int64_t inserted, const Tensor& reply_rows,
                  const Tensor& reply_clocks, const Tensor& fresh_t, const Tensor& init_seeds,
                  const Tensor& init_values, int64_t dim) {
  const Slots slots(meta_t, rows_t);
  const auto* slot_of = data<const int64_t>(slots_t, "slots");
  const auto* reply = data<const float>(reply_rows, "reply_rows");
  const auto* clocks = data<const int64_t>(reply_clocks, "reply_clocks");
  const auto* fresh = data<const uint8_t>(fresh_t, "fresh");
  const Inits inits(init_seeds, init_values);
  const int64_t n = slots_t.numel(), width = slots.width;
  STD_TORCH_CHECK(reply_rows.numel() == n * width && reply_clocks.numel() == n && fresh_t.numel() == n,
                  "a reply must hold one row, clock and fresh flag a slot (", n, ")");
  std::vector<float> made(static_cast<size_t>(width));
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      __builtin_prefetch(slots.meta + slot_of[i + kAhead], 1);
      prefetch_floats<1>(slots.values(slot_of[i + kAhead]), width);
    }
    SlotMeta& meta = slots.meta[slot_of[i]];
    const float* row = reply + i * width;
    float* values = slots.values(slot_of[i]);
    if (fresh[i]) {
      init_row(inits.at(meta.table), meta.key, dim, width - dim, made.data());
      row = made.data();
    }
    meta.start_clock = fresh[i] ? 0 : clocks[i];
    if (i < inserted) {  // the slot's deltas are zero already: its former row left by a cut, or was clean
      std::memcpy(values, row, sizeof(float) * static_cast<size_t>(width));
    } else {
      const float* delta = slots.deltas(slot_of[i]);
      for (int64_t d = 0; d < width; ++d) values[d] = row[d] + delta[d];
    }
  }
}

void cache_release(Tensor meta_t, Tensor priority_t, const Tensor& slots_t) {
  auto* meta = reinterpret_cast<SlotMeta*>(data<int64_t>(meta_t, "meta"));
  auto* priority = data<int64_t>(priority_t, "priority");
  const auto* slot = data<const int64_t>(slots_t, "slots");
  for (int64_t i = 0; i < slots_t.numel(); ++i) {
    if (--meta[slot[i]].pins == 0 && slot[i] < priority_t.numel()) priority[slot[i]] &= ~kPinned;
  }
}

void init_rows(Tensor rows_t, const Tensor& fresh_t, const Tensor& keys_t, const Tensor& tables_t,
               const Tensor& init_seeds, const Tensor& init_values, int64_t dim) {
  auto* rows = data<float>(rows_t, "rows");
  const auto* fresh = data<const uint8_t>(fresh_t, "fresh");
  const auto* keys = data<const int64_t>(keys_t, "keys");
  const auto* tables = data<const int32_t>(tables_t, "tables");
  const Inits inits(init_seeds, init_values);
  const int64_t width = rows_t.size(1);
  for (int64_t i = 0; i < keys_t.numel(); ++i) {
    if (fresh[i]) init_row(inits.at(tables[i]), keys[i], dim, width - dim, rows + i * width);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hetrec, CPU, m) {
  m.impl("cache_cut", TORCH_BOX(&cache_cut));
  m.impl("cache_answered", TORCH_BOX(&cache_answered));
  m.impl("cache_commit", TORCH_BOX(&cache_commit));
  m.impl("cache_release", TORCH_BOX(&cache_release));
  m.impl("init_rows", TORCH_BOX(&init_rows));
}

}  // namespace hetrec
