// Spill rows: slots behind the sets for rows that go through without being kept. They are found again while a batch in
// flight uses them, and leave at the next plan.
#pragma once

#include <vector>

#include "core/hash.h"
#include "ops/cpu/slots.h"

namespace hetrec {

class SpillArea {
 public:
  SpillArea(const Slots& slots, int64_t capacity) : slots_(slots), capacity_(capacity) {}

  // One pass over the area, which is as large as the batches in flight needed: what none of them uses leaves, the dirty
  // ones into `push`. Slots that left are free at once, but hold their deltas until `push` is cut.
  void sweep(std::vector<int64_t>* push) {
    for (int64_t slot = capacity_; slot < slots_.n; ++slot) {
      SlotMeta& meta = slots_.meta[slot];
      if (meta.table >= 0 && meta.pins > 0) {
        in_use_.push_back(slot);
        continue;
      }
      if (meta.table >= 0) {
        left_.push_back(slot);
        if (meta.pending > 0) push->push_back(slot);
      }
      free_.push_back(slot);
    }
    size_t size = 64;
    while (size < 2 * in_use_.size()) size *= 2;
    index_.assign(size, -1);
    for (const int64_t slot : in_use_) {
      size_t at = start(hash_row(slots_.meta[slot].table, slots_.meta[slot].key));
      while (index_[at] >= 0) at = (at + 1) & (index_.size() - 1);
      index_[at] = slot;
    }
  }

  // The slot in use that holds the row, or -1. `hash` is the row's.
  int64_t find(uint64_t hash, int64_t key, int32_t table) const {
    for (size_t at = start(hash); index_[at] >= 0; at = (at + 1) & (index_.size() - 1)) {
      const SlotMeta& meta = slots_.meta[index_[at]];
      if (meta.key == key && meta.table == table) return index_[at];
    }
    return -1;
  }

  // A free slot, or -1. The lowest come first, so that rows of a batch lie together.
  int64_t take() { return taken_ < free_.size() ? free_[taken_++] : -1; }

  // Empties the slots that left; to be called after the cut and before newcomers are written.
  void vacate() const {
    for (const int64_t slot : left_) slots_.meta[slot].table = -1;
  }

 private:
  size_t start(uint64_t hash) const { return (hash >> 8) & (index_.size() - 1); }

  const Slots& slots_;
  int64_t capacity_;
  std::vector<int64_t> in_use_, left_, free_, index_;
  size_t taken_ = 0;
};

}  // namespace hetrec
