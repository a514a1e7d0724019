// cache_plan and cache_spill: which rows hit, which must be fetched, what must leave and be pushed.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/clock.h"
#include "core/hash.h"
#include "ops/cpu/slots.h"

namespace hetrec {
namespace {

struct RowName {
  int32_t table;
  int64_t key;
  bool operator==(const RowName&) const = default;
};
struct RowNameHash {
  size_t operator()(const RowName& row) const { return hash_row(row.table, row.key); }
};
using SpillIndex = std::unordered_map<RowName, int64_t, RowNameHash>;

// Spill rows hold what found no way in its set. Those no batch in flight uses leave now (the dirty ones into `push`);
// the rest stay findable.
SpillIndex sweep_spill(const Slots& slots, int64_t capacity, std::vector<int64_t>* push, std::vector<int64_t>* freed) {
  SpillIndex in_use;
  for (int64_t slot = capacity; slot < slots.n; ++slot) {
    const SlotMeta& meta = slots.meta[slot];
    if (meta.table < 0) continue;
    if (meta.pins > 0) {
      in_use.emplace(RowName{meta.table, meta.key}, slot);
      continue;
    }
    if (meta.pending > 0) push->push_back(slot);
    freed->push_back(slot);
  }
  return in_use;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cache_plan(
    Tensor tags_t, Tensor priority_t, Tensor meta_t, Tensor rows_t, const Tensor& keys_t, const Tensor& tables_t,
    int64_t policy_code, int64_t tick, const Tensor& staleness_t, bool spill_in_use, bool want_checks) {
  auto* tags = data<uint8_t>(tags_t, "tags");
  auto* priority = data<int64_t>(priority_t, "priority");
  const Slots slots(meta_t, rows_t);
  const auto* keys = data<const int64_t>(keys_t, "keys");
  const auto* tables = data<const int32_t>(tables_t, "tables");
  const auto* staleness = data<const int64_t>(staleness_t, "staleness");
  const int64_t capacity = tags_t.numel();
  const int64_t n = keys_t.numel();
  STD_TORCH_CHECK(capacity > 0 && capacity % kWays == 0 && priority_t.numel() == capacity && slots.n >= capacity,
                  "a cache has a multiple of 32 slots, got ", capacity);
  STD_TORCH_CHECK(tick >= 0 && tick < kPinned, "tick must be in [0, 2^56), got ", tick);
  STD_TORCH_CHECK(policy_code >= 0 && policy_code < kPolicies, "unknown policy ", policy_code);
  const auto policy = static_cast<Policy>(policy_code);
  const int64_t n_sets = capacity / kWays;
  for (int64_t u = 0; u < n; ++u) {
    STD_TORCH_CHECK(tables[u] >= 0 && tables[u] < staleness_t.numel(), "table id ", tables[u],
                    " has no staleness bound; ", staleness_t.numel(), " tables are known");
  }

  std::vector<int64_t> push_from, freed;
  SpillIndex spill;
  if (spill_in_use) spill = sweep_spill(slots, capacity, &push_from, &freed);
  Push spilled = cut_push(slots, push_from);
  for (const int64_t slot : freed) slots.meta[slot].table = -1;
  push_from.clear();

  Tensor slots_out = empty<int64_t>({n});
  auto* slot_of = data<int64_t>(slots_out, "slots");
  std::vector<int32_t> misses, refresh, late, checks;
  std::vector<int64_t> check_clocks;
  misses.reserve(static_cast<size_t>(n));

  const auto use_slot = [&](int64_t u, int64_t slot) {
    SlotMeta& meta = slots.meta[slot];
    slot_of[u] = slot;
    const int64_t bound = staleness[tables[u]];
    if (!write_is_fresh(meta.pending, meta.pins, bound)) {
      // A refresh now resets what was pending; the updates to come of batches in flight may still be too many.
      (meta.pins <= bound && meta.answers_due == 0 ? refresh : late).push_back(static_cast<int32_t>(u));
      ++meta.answers_due;
    } else if (want_checks && meta.answers_due == 0) {
      checks.push_back(static_cast<int32_t>(u));
      check_clocks.push_back(meta.start_clock + meta.pending);
      ++meta.answers_due;
    }
    ++meta.pins;
  };

  // Probe in blocks: tags on their way while the hashes of a block are made, slots while its tags are matched.
  constexpr int64_t kBlock = 32;
  uint64_t hashes[kBlock];
  uint32_t matches[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    for (int64_t u = begin; u < end; ++u) {
      hashes[u - begin] = hash_row(tables[u], keys[u]);
      __builtin_prefetch(tags + set_of(hashes[u - begin], n_sets) * kWays);
    }
    for (int64_t u = begin; u < end; ++u) {
      const uint64_t hash = hashes[u - begin];
      const int64_t base = set_of(hash, n_sets) * kWays;
      matches[u - begin] = match_tags(tags + base, tag_of(hash));
      if (matches[u - begin] == 0) continue;
      const int64_t slot = base + __builtin_ctz(matches[u - begin]);
      __builtin_prefetch(slots.meta + slot, 1);
      __builtin_prefetch(priority + slot, 1);
    }
    for (int64_t u = begin; u < end; ++u) {
      const int64_t base = set_of(hashes[u - begin], n_sets) * kWays;
      bool found = false;
      for (uint32_t mask = matches[u - begin]; mask != 0 && !found; mask &= mask - 1) {
        const int64_t slot = base + __builtin_ctz(mask);
        if (slots.meta[slot].key != keys[u] || slots.meta[slot].table != tables[u]) continue;
        use_slot(u, slot);
        priority[slot] = used_priority(policy, priority[slot], tick) | kPinned;
        found = true;
      }
      if (!found && !spill.empty()) {
        if (const auto it = spill.find({tables[u], keys[u]}); it != spill.end()) {
          use_slot(u, it->second);
          found = true;
        }
      }
      if (!found) misses.push_back(static_cast<int32_t>(u));
    }
  }

  // Choose victims. All hits are pinned by now, so no row of this batch is thrown out by another one.
  const auto n_misses = static_cast<int64_t>(misses.size());
  int64_t unplaced = 0;
  Tensor fetch_t = empty<int32_t>({n_misses + static_cast<int64_t>(refresh.size())});
  auto* fetch = data<int32_t>(fetch_t, "fetch");
  const auto base_of_miss = [&](int64_t j) {
    const auto u = static_cast<size_t>(misses[static_cast<size_t>(j)]);
    return set_of(hash_row(tables[u], keys[u]), n_sets) * kWays;
  };
  for (int64_t j = 0; j < n_misses; ++j) {
    if (j + kAhead < n_misses) {
      const int64_t base = base_of_miss(j + kAhead);
      for (int line = 0; line < 4; ++line) __builtin_prefetch(priority + base + 8 * line, 1);
    }
    const int64_t base = base_of_miss(j);
    const int32_t u = misses[static_cast<size_t>(j)];
    fetch[j] = u;
    const int way = victim_way(priority + base);
    if (way < 0) {
      slot_of[u] = -1;
      ++unplaced;
      continue;
    }
    const int64_t slot = base + way;
    slot_of[u] = slot;
    tags[slot] = tag_of(hash_row(tables[u], keys[u]));
    priority[slot] = used_priority(policy, kEmpty, tick) | kPinned;
    __builtin_prefetch(slots.meta + slot, 1);
  }

  // Cut what leaves, then let the newcomers in.
  int64_t evicted = 0;
  for (int64_t j = 0; j < n_misses; ++j) {
    const int64_t slot = slot_of[fetch[j]];
    if (slot < 0) continue;
    evicted += slots.meta[slot].table >= 0;
    if (slots.meta[slot].pending > 0) push_from.push_back(slot);
  }
  for (size_t j = 0; j < refresh.size(); ++j) {
    const int64_t slot = slot_of[refresh[j]];
    fetch[n_misses + static_cast<int64_t>(j)] = refresh[j];
    if (slots.meta[slot].pending > 0) push_from.push_back(slot);
  }
  Push push = cut_push(slots, push_from);
  for (int64_t j = 0; j < n_misses; ++j) {
    const int32_t u = fetch[j];
    if (slot_of[u] < 0) continue;
    slots.meta[slot_of[u]] = {keys[u], 0, 0, tables[u], 1, 1};
  }
  if (spilled.keys.numel() > 0) {  // rare: join both pushes
    const int64_t a = spilled.keys.numel(), b = push.keys.numel();
    Push both{empty<int64_t>({a + b}), empty<int32_t>({a + b}), empty<int64_t>({a + b}), empty<int64_t>({a + b}),
              empty<float>({a + b, slots.width})};
    const auto join = [&](Tensor Push::* field) {
      for (auto [from, start] : {std::pair{&spilled, int64_t{0}}, std::pair{&push, a}}) {
        Tensor part = torch::stable::narrow(both.*field, 0, start, (from->*field).size(0));
        torch::stable::copy_(part, from->*field);
      }
    };
    for (const auto field : {&Push::keys, &Push::tables, &Push::starts, &Push::clocks, &Push::deltas}) join(field);
    push = both;
  }
  const int64_t counts[4] = {n_misses, evicted, unplaced, static_cast<int64_t>(spill.size())};
  return {slots_out,
          fetch_t,
          from_values(late.data(), static_cast<int64_t>(late.size())),
          from_values(checks.data(), static_cast<int64_t>(checks.size())),
          from_values(check_clocks.data(), static_cast<int64_t>(check_clocks.size())),
          push.keys,
          push.tables,
          push.starts,
          push.clocks,
          push.deltas,
          from_values(counts, 4)};
}

Tensor cache_spill(Tensor meta_t, Tensor slots_t, const Tensor& keys_t, const Tensor& tables_t, int64_t capacity) {
  auto* meta = reinterpret_cast<SlotMeta*>(data<int64_t>(meta_t, "meta"));
  auto* slot_of = data<int64_t>(slots_t, "slots");
  const auto* keys = data<const int64_t>(keys_t, "keys");
  const auto* tables = data<const int32_t>(tables_t, "tables");
  int64_t free_slot = capacity, unplaced = 0;
  for (int64_t u = 0; u < slots_t.numel(); ++u) {
    if (slot_of[u] >= 0) continue;
    while (free_slot < meta_t.size(0) && meta[free_slot].table >= 0) ++free_slot;
    if (free_slot == meta_t.size(0)) {
      ++unplaced;
      continue;
    }
    meta[free_slot] = {keys[u], 0, 0, tables[u], 1, 1};
    slot_of[u] = free_slot;
  }
  return from_values(&unplaced, 1);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hetrec, CPU, m) {
  m.impl("cache_plan", TORCH_BOX(&cache_plan));
  m.impl("cache_spill", TORCH_BOX(&cache_spill));
}

}  // namespace hetrec
