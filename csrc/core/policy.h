// Eviction policies. Each slot has one priority; the row with the lowest of its set leaves first.
//
// Bits of a priority: 63 empty (kEmpty = -1), 56 pinned, below them what the policy knows:
//   lru         0..30 the batch that used the row last
//   lfu         32..55 batches that used it since it came, then 0..30 the last one
//   light_lfu   32..55 frequency, then 0..30 the last batch that counted it
//   tiny_lfu    32..55 frequency, then 0..30 the last batch
//   lookahead   bit 55 where a coming batch is known to use the row: 8..38 how soon, 0..7 frequency; else as tiny_lfu
//
// Frequency is a number from 0 to kMostFrequent that a use raises by kUse and ageing halves: one set for every
// kUsesAnAgeing * kWays rows used, in turn, so that each set is aged once per kUsesAnAgeing rows and slot. kUse is 2,
// not 1, so that a single use is still remembered after one halving. Being bounded, it takes four ageings at most until
// yesterday's frequent rows are forgotten.
#pragma once

#include <cstdint>

#include "hd.h"

namespace hetrec {

constexpr int64_t kEmpty = -1;
constexpr int64_t kPinned = int64_t{1} << 56;

enum class Policy : int32_t { kLru = 0, kLfu = 1, kLightLfu = 2, kTinyLfu = 3, kLookahead = 4 };
constexpr int kPolicies = 5;

constexpr int64_t kUse = 2;
constexpr int64_t kMostFrequent = 15;
constexpr int64_t kUsesAnAgeing = 16;

// light_lfu: a row of this frequency is not counted any more until its set is aged.
constexpr int64_t kFrequentEnough = 6;

constexpr int64_t kLastTick = (int64_t{1} << 31) - 1;
constexpr int64_t kNever = -1;  // no coming batch is known to use the row

constexpr bool ages(Policy policy) { return policy != Policy::kLru && policy != Policy::kLfu; }

// Whether a newcomer must not be worse than the row it would replace, and frequencies are remembered beyond eviction.
constexpr bool admits(Policy policy) { return policy == Policy::kTinyLfu || policy == Policy::kLookahead; }

constexpr int64_t kKnown = int64_t{1} << 55;
constexpr int64_t kMostUses = (int64_t{1} << 23) - 1;  // of lfu; leaves bit 55 alone

// How often the row was used: lfu's count, the others' frequency.
HETREC_HD int64_t frequency_of(int64_t priority) {
  return (priority & kKnown) != 0 ? priority & 0xff : priority >> 32 & kMostUses;
}

// The priority of a row that batch `tick` uses, `frequency` including this use. `next`: the first coming batch that
// will use it again, or kNever.
HETREC_HD int64_t priority_of(Policy policy, int64_t frequency, int64_t tick, int64_t next = kNever) {
  if (policy == Policy::kLru) return tick;
  if (policy == Policy::kLookahead && next != kNever) return kKnown | (kLastTick - next) << 8 | frequency;
  return frequency << 32 | tick;
}

HETREC_HD int64_t one_use_more(Policy policy, int64_t frequency) {
  if (policy == Policy::kLfu) return frequency < kMostUses ? frequency + 1 : kMostUses;
  return frequency + kUse < kMostFrequent ? frequency + kUse : kMostFrequent;
}

HETREC_HD int64_t aged_priority(int64_t priority) {
  const int64_t frequency = frequency_of(priority);
  const int shift = (priority & kKnown) != 0 ? 0 : 32;
  return priority + ((frequency / 2 - frequency) << shift);
}

// Sets that have been aged, counting rounds, once `uses` rows were used in all.
HETREC_HD int64_t sets_aged(int64_t uses, int ways) { return uses / (kUsesAnAgeing * ways); }

}  // namespace hetrec
