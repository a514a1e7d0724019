// cache_reveal and cache_unreveal: what the lookahead policy knows of batches to come.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "core/cache_set.h"
#include "core/hash.h"
#include "core/window.h"
#include "ops/cpu/tensors.h"

namespace hetrec {
namespace {

Tensor cache_reveal(const Tensor& tags_t, Tensor priority_t, const Tensor& meta_t, Tensor window_t,
                    const Tensor& keys_t, const Tensor& tables_t, int64_t tick) {
  const auto* tags = data<const uint8_t>(tags_t, "tags");
  auto* priority = data<int64_t>(priority_t, "priority");
  const auto* meta = reinterpret_cast<const SlotMeta*>(data<const int64_t>(meta_t, "meta"));
  auto* window = reinterpret_cast<ComingUses*>(data<int64_t>(window_t, "window"));
  const auto* keys = data<const int64_t>(keys_t, "keys");
  const auto* tables = data<const int32_t>(tables_t, "tables");
  const int64_t n = keys_t.numel(), n_sets = tags_t.numel() / kWays;
  const int64_t buckets = window_t.numel() / (2 * kBucketEntries);
  STD_TORCH_CHECK(buckets > 0 && window_t.numel() % (2 * kBucketEntries) == 0, "window must be (buckets, ",
                  kBucketEntries, ", 2), and not empty");
  STD_TORCH_CHECK(tick >= 0 && tick < kLastTick, "tick must be in [0, 2^31 - 1), got ", tick);
  const uint64_t bit = batch_bit(tick);

  int64_t lost = 0;
  constexpr int64_t kBlock = 32;
  uint64_t hashes[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    for (int64_t u = begin; u < end; ++u) {
      const uint64_t hash = hash_row(tables[u], keys[u]);
      hashes[u - begin] = hash;
      const ComingUses* bucket = window_bucket(window, buckets, hash);
      __builtin_prefetch(bucket, 1);
      __builtin_prefetch(bucket + kBucketEntries / 2, 1);
      __builtin_prefetch(tags + set_of(hash, n_sets) * kWays);
    }
    // Rows without a nearer use in view: if they are cached, this batch is when they are used next.
    uint32_t matches[kBlock];
    for (int64_t u = begin; u < end; ++u) {
      const uint64_t hash = hashes[u - begin];
      matches[u - begin] = 0;
      ComingUses* bucket = window_bucket(window, buckets, hash);
      if (ComingUses* known = find_coming(bucket, hash); known != nullptr) {
        known->batches |= bit;
        continue;
      }
      if (ComingUses* free = free_coming(bucket); free != nullptr) {
        *free = {hash, bit};
      } else {
        ++lost;
      }
      const int64_t base = set_of(hash, n_sets) * kWays;
      matches[u - begin] = match_tags(tags + base, tag_of(hash));
      if (matches[u - begin] == 0) continue;
      __builtin_prefetch(meta + base + __builtin_ctz(matches[u - begin]));
      __builtin_prefetch(priority + base + __builtin_ctz(matches[u - begin]), 1);
    }
    for (int64_t u = begin; u < end; ++u) {
      if (matches[u - begin] == 0) continue;
      const int64_t base = set_of(hashes[u - begin], n_sets) * kWays;
      const int way = find_way(meta + base, matches[u - begin], keys[u], tables[u]);
      if (way < 0 || (priority[base + way] & kKnown) != 0) continue;
      const int64_t before = priority[base + way];
      priority[base + way] =
          priority_of(Policy::kLookahead, frequency_of(before), kLastTick, tick) | (before & kPinned);
    }
  }
  return from_values(&lost, 1);
}

void cache_unreveal(Tensor priority_t, Tensor window_t) {
  auto* priority = data<int64_t>(priority_t, "priority");
  auto* window = data<int64_t>(window_t, "window");
  std::fill_n(window, window_t.numel(), 0);
  for (int64_t slot = 0; slot < priority_t.numel(); ++slot) {
    const int64_t before = priority[slot];
    if (before == kEmpty || (before & kKnown) == 0) continue;
    priority[slot] = priority_of(Policy::kLookahead, frequency_of(before), 0) | (before & kPinned);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hetrec, CPU, m) {
  m.impl("cache_reveal", TORCH_BOX(&cache_reveal));
  m.impl("cache_unreveal", TORCH_BOX(&cache_unreveal));
}

}  // namespace hetrec
