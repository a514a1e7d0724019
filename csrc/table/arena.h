// Memory for a table's rows and indices: bump allocation from large slabs backed by huge pages, because rows are
// visited at random and with small pages most of that time is spent walking page tables.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <new>
#include <vector>

namespace hetrec {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { clear(); }

  // `bytes` of uninitialised memory, 64-byte aligned; cut from the smallest block given to `recycle` that is large
  // enough, so that outgrown indices serve as rows.
  void* allocate(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (const auto it = recycled_.lower_bound(bytes); it != recycled_.end()) {
      const size_t found = it->first;
      auto* block = static_cast<std::byte*>(it->second.back());
      it->second.pop_back();
      if (it->second.empty()) recycled_.erase(it);
      if (found > bytes) recycled_[found - bytes].push_back(block + bytes);
      return block;
    }
    if (slabs_.empty() || used_ + bytes > slabs_.back().bytes) add_slab(bytes);
    void* block = slabs_.back().start + used_;
    used_ += bytes;
    return block;
  }

  void recycle(void* block, size_t bytes) { recycled_[(bytes + 63) / 64 * 64].push_back(block); }

  void clear() {
    for (const Slab& slab : slabs_) std::free(slab.start);
    slabs_.clear();
    recycled_.clear();
    used_ = 0;
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kSlab = size_t{8} << 20;

  struct Slab {
    std::byte* start;
    size_t bytes;
  };

  void add_slab(size_t at_least) {
    size_t bytes = at_least > kSlab ? at_least : kSlab;
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    auto* start = static_cast<std::byte*>(std::aligned_alloc(kHugePage, bytes));
    if (start == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(start, bytes, MADV_HUGEPAGE);  // advice: where it is refused, small pages serve
#endif
    slabs_.push_back({start, bytes});
    used_ = 0;
  }

  std::vector<Slab> slabs_;
  size_t used_ = 0;                                // of the last slab
  std::map<size_t, std::vector<void*>> recycled_;  // by size; no list is empty
};

}  // namespace hetrec
