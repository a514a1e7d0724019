// The set-associative cache's logic: 32 ways a set, found by a one-byte tag, evicted by the lowest priority.
//
// Eviction rule: the way with the lowest priority goes; ties go to the lowest way. An empty way has priority kEmpty,
// below every row. A pinned row (some batch in flight uses it) carries kPinned in its priority, above every unpinned
// one: when the lowest priority of a set is a pinned one, nothing can be evicted and the newcomer overflows. What a
// priority says is the policy's: core/policy.h.
#pragma once

#include <cstdint>

#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
#include <emmintrin.h>
#endif

#include "hd.h"
#include "policy.h"

namespace hetrec {

constexpr int kWays = 32;

// What a slot holds, 32 bytes. `pending` counts the updates not yet pushed, `pins` the batches in flight, `answers_due`
// those of them whose request asks about the row (a check, a fetch, or one still to be made) and is not answered yet.
//
// While an answer is due nobody else asks about the row: a second request could push what the first answer, computed
// before it, does not contain, and committing that answer would take the rank's own updates away for a while.
//
// light_lfu: a frequent row holds kFrequent pins of its own. While it does, its priority stays pinned, and using or
// unpinning it touches nothing but this record. It loses them when its set is aged, or leaves when no other row can.
struct SlotMeta {
  int64_t key;
  int64_t start_clock;
  int32_t pending;
  int32_t table;  // -1: the slot is empty
  int32_t pins;
  int32_t answers_due;
};
static_assert(sizeof(SlotMeta) == 32);

constexpr int32_t kFrequent = int32_t{1} << 30;

// Batches in flight that use the slot.
HETREC_HD int32_t batches_in_flight(const SlotMeta& meta) { return meta.pins & (kFrequent - 1); }

// Ways of a set whose tag equals `tag`, one bit each.
HETREC_HD uint32_t match_tags(const uint8_t* tags, uint8_t tag) {
#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
  const __m128i wanted = _mm_set1_epi8(static_cast<char>(tag));
  const auto half = [&](const uint8_t* at) {
    const __m128i ways = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(ways, wanted)));
  };
  return half(tags) | half(tags + 16) << 16;
#else
  uint32_t mask = 0;
  for (int way = 0; way < kWays; ++way) mask |= static_cast<uint32_t>(tags[way] == tag) << way;
  return mask;
#endif
}

// The way to evict, or -1 when every row is pinned. Priorities stay below 2^57, so that the way fits beneath them.
HETREC_HD int victim_way(const int64_t* priority) {
  int64_t lowest = INT64_MAX;
  for (int way = 0; way < kWays; ++way) {
    const int64_t candidate = priority[way] * kWays + way;
    lowest = candidate < lowest ? candidate : lowest;
  }
  const int way = static_cast<int>(lowest & (kWays - 1));
  return (priority[way] & kPinned) != 0 && priority[way] >= 0 ? -1 : way;
}

// light_lfu, where victim_way finds nothing: the frequent way that no batch in flight uses and that was counted last
// longest ago, or -1.
HETREC_HD int frequent_victim_way(const int64_t* priority, const SlotMeta* meta) {
  int way = -1;
  for (int candidate = 0; candidate < kWays; ++candidate) {
    if (meta[candidate].pins != kFrequent) continue;
    if (way < 0 || priority[candidate] < priority[way]) way = candidate;
  }
  return way;
}

HETREC_HD int lowest_bit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return __builtin_ctz(bits);
#endif
}

// The way of a set that holds the row, or -1; `matches` as of match_tags.
HETREC_HD int find_way(const SlotMeta* meta, uint32_t matches, int64_t key, int32_t table) {
  for (; matches != 0; matches &= matches - 1) {
    const int way = lowest_bit(matches);
    if (meta[way].key == key && meta[way].table == table) return way;
  }
  return -1;
}

}  // namespace hetrec
