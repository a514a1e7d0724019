// Which of the coming batches use a row, for the lookahead policy.
//
// A hash table of buckets of 8 entries; an entry is a row's hash and one bit for each of the 64 coming batches, batch
// t's being bit t mod 64. A batch that comes into view sets its bit, the plan of a batch clears it; an entry without
// bits is free. A row that finds its bucket full is not recorded: a hint is lost, nothing else.
#pragma once

#include <cstdint>

#include "hd.h"

#if !defined(__CUDA_ARCH__)
#include <bit>
#endif

namespace hetrec {

constexpr int kBucketEntries = 8;
constexpr int64_t kWindowBatches = 64;

struct ComingUses {
  uint64_t hash;
  uint64_t batches;
};
static_assert(sizeof(ComingUses) == 16);

HETREC_HD ComingUses* window_bucket(ComingUses* window, int64_t buckets, uint64_t hash) {
  return window + static_cast<int64_t>((hash >> 32) * static_cast<uint64_t>(buckets) >> 32) * kBucketEntries;
}

// The row's entry, or null.
HETREC_HD ComingUses* find_coming(ComingUses* bucket, uint64_t hash) {
  for (int i = 0; i < kBucketEntries; ++i) {
    if (bucket[i].hash == hash && bucket[i].batches != 0) return bucket + i;
  }
  return nullptr;
}

// A free entry, or null.
HETREC_HD ComingUses* free_coming(ComingUses* bucket) {
  for (int i = 0; i < kBucketEntries; ++i) {
    if (bucket[i].batches == 0) return bucket + i;
  }
  return nullptr;
}

HETREC_HD uint64_t batch_bit(int64_t tick) { return uint64_t{1} << (tick % kWindowBatches); }

// The first batch after `tick` among `batches`, which must not be empty.
HETREC_HD int64_t first_after(uint64_t batches, int64_t tick) {
  const int start = static_cast<int>((tick + 1) % kWindowBatches);
  const uint64_t from_start = start == 0 ? batches : batches >> start | batches << (64 - start);
#if defined(__CUDA_ARCH__)
  return tick + __ffsll(static_cast<long long>(from_start));
#else
  return tick + 1 + std::countr_zero(from_start);
#endif
}

}  // namespace hetrec
