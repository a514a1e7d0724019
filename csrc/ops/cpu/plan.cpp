// cache_plan and cache_spill: which rows hit, which must be fetched, what must leave and be pushed.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/clock.h"
#include "core/frequency_sketch.h"
#include "core/hash.h"
#include "core/window.h"
#include "ops/cpu/slots.h"
#include "ops/cpu/spill.h"

namespace hetrec {
namespace {

// What the policies keep. `sketch`: kSketchBytes a set, for those that admit; `window`: lookahead's, null before a
// batch came into view.
struct PolicyState {
  int64_t* priority;
  uint8_t* sketch;
  ComingUses* window;
  int64_t buckets;
  int64_t tick;
};

// A batch on its way through the cache. kPolicy is known to the compiler: what a policy does not need is not there.
template <Policy kPolicy>
class Planner {
 public:
  Planner(uint8_t* tags, const PolicyState& policy, const Slots& slots, int64_t capacity, const int64_t* staleness,
          bool want_checks, SpillArea* spill)
      : tags_(tags),
        priority_(policy.priority),
        policy_(policy),
        slots_(slots),
        n_sets_(capacity / kWays),
        staleness_(staleness),
        want_checks_(want_checks),
        spill_(spill) {}

  // Ages the sets whose turn it is after `uses` rows, and before `n` more.
  void age(int64_t uses, int64_t n) {
    if constexpr (!ages(kPolicy)) return;
    const int64_t end = sets_aged(uses + n, kWays);
    for (int64_t turn = sets_aged(uses, kWays); turn < end; ++turn) {
      const int64_t set = turn % n_sets_;
      for (int64_t slot = set * kWays; slot < (set + 1) * kWays; ++slot) {
        if (priority_[slot] == kEmpty) continue;
        if (kPolicy == Policy::kLightLfu && frequency_of(priority_[slot]) >= kFrequentEnough) {
          SlotMeta& meta = slots_.meta[slot];
          meta.pins = batches_in_flight(meta);
          if (meta.pins == 0) priority_[slot] &= ~kPinned;
        }
        priority_[slot] = aged_priority(priority_[slot]);
      }
      if constexpr (admits(kPolicy)) age_sketch(policy_.sketch + set * kSketchBytes);
    }
  }

  // Finds and pins what is there, in blocks: tags on their way while the hashes of a block are made, slots while its
  // tags are matched.
  void probe(const int64_t* keys, const int32_t* tables, int64_t n, int64_t* slot_of) {
    constexpr int64_t kBlock = 32;
    uint64_t hashes[kBlock];
    uint32_t matches[kBlock];
    misses_.reserve(static_cast<size_t>(n));
    if constexpr (kPolicy == Policy::kLightLfu) to_count_.reserve(static_cast<size_t>(n));
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = std::min(n, begin + kBlock);
      for (int64_t u = begin; u < end; ++u) {
        const uint64_t hash = hash_row(tables[u], keys[u]);
        hashes[u - begin] = hash;
        __builtin_prefetch(tags_ + base_of(hash));
        if (sees_ahead()) {
          const ComingUses* bucket = window_bucket(policy_.window, policy_.buckets, hash);
          __builtin_prefetch(bucket, 1);
          __builtin_prefetch(bucket + kBucketEntries / 2, 1);
        }
      }
      for (int64_t u = begin; u < end; ++u) {
        const uint64_t hash = hashes[u - begin];
        matches[u - begin] = match_tags(tags_ + base_of(hash), tag_of(hash));
        if (matches[u - begin] == 0) continue;
        const int64_t slot = base_of(hash) + lowest_bit(matches[u - begin]);
        __builtin_prefetch(slots_.meta + slot, 1);
        if constexpr (kPolicy != Policy::kLightLfu) __builtin_prefetch(priority_ + slot, 1);
      }
      for (int64_t u = begin; u < end; ++u) {
        const uint64_t hash = hashes[u - begin];
        const int64_t base = base_of(hash), next = next_use(hash);
        const int way = find_way(slots_.meta + base, matches[u - begin], keys[u], tables[u]);
        if (way >= 0) {
          slot_of[u] = base + way;
          use(u, slot_of[u], tables[u]);
          count(slot_of[u], next);
          continue;
        }
        if (const int64_t slot = spill_->find(hash, keys[u], tables[u]); slot >= 0) {
          slot_of[u] = slot;
          use(u, slot, tables[u]);
          if constexpr (admits(kPolicy)) {
            const SketchCells cells = sketch_cells(hash);
            uint8_t* sketch = sketch_of(base);
            remember(sketch, cells, one_use_more(kPolicy, remembered(sketch, cells)));
          }
          continue;
        }
        misses_.push_back({hash, next, static_cast<int32_t>(u)});
      }
    }
    if constexpr (kPolicy == Policy::kLightLfu) count_found();
  }

  // Chooses slots for what is not there. All hits are pinned by now, so no row of this batch is thrown out by another.
  void place(int64_t* slot_of) {
    left_.reserve(misses_.size());
    SketchCells ring[kAhead];  // worked out, and fetched, kAhead misses early
    const auto look_ahead = [&](size_t j) {
      const int64_t base = base_of(misses_[j].hash);
      for (int line = 0; line < 4; ++line) __builtin_prefetch(priority_ + base + 8 * line, 1);
      if constexpr (admits(kPolicy)) {
        ring[j % kAhead] = sketch_cells(misses_[j].hash);
        __builtin_prefetch(sketch_of(base) + ring[j % kAhead].byte[0], 1);
      }
    };
    for (size_t j = 0; j < std::min<size_t>(misses_.size(), kAhead); ++j) look_ahead(j);
    for (size_t j = 0; j < misses_.size(); ++j) {
      const SketchCells cells = ring[j % kAhead];
      if (j + kAhead < misses_.size()) look_ahead(j + kAhead);
      const Miss& miss = misses_[j];
      const int64_t base = base_of(miss.hash);
      int64_t before = 0;
      if constexpr (admits(kPolicy)) before = remembered(sketch_of(base), cells);
      const int64_t frequency = one_use_more(kPolicy, before);
      const int64_t priority = priority_of(kPolicy, frequency, policy_.tick, miss.next);
      int way = victim_way(priority_ + base);
      if (kPolicy == Policy::kLightLfu && way < 0) {
        way = frequent_victim_way(priority_ + base, slots_.meta + base);
        if (way >= 0) slots_.meta[base + way].pins = 1;  // the newcomer's already, so that no other one takes the slot
      }
      const bool refused = admits(kPolicy) && way >= 0 && priority < priority_[base + way];
      if (way < 0 || refused) {
        ++(refused ? bypassed_ : overflow_);
        if constexpr (admits(kPolicy)) remember(sketch_of(base), cells, frequency);
        slot_of[miss.u] = spill_->take();
        unplaced_ += slot_of[miss.u] < 0;
        continue;
      }
      const int64_t slot = base + way;
      slot_of[miss.u] = slot;
      left_.push_back({slot, priority_[slot] == kEmpty ? 0 : frequency_of(priority_[slot])});
      tags_[slot] = tag_of(miss.hash);
      priority_[slot] = priority | kPinned;
      __builtin_prefetch(slots_.meta + slot, 1);
    }
  }

  // What leaves or is fetched again and has pending deltas joins `push`; a row that leaves is remembered.
  void gather(const int64_t* slot_of, std::vector<int64_t>* push) {
    for (const Left& left : left_) {
      const SlotMeta& meta = slots_.meta[left.slot];
      if (meta.table < 0) continue;
      ++evicted_;
      if (meta.pending > 0) push->push_back(left.slot);
      if constexpr (admits(kPolicy)) {
        const int64_t base = left.slot / kWays * kWays;
        remember(sketch_of(base), sketch_cells(hash_row(meta.table, meta.key)), left.frequency);
      }
    }
    for (const int32_t u : refresh) {
      if (slots_.meta[slot_of[u]].pending > 0) push->push_back(slot_of[u]);
    }
  }

  // Writes the newcomers' records; what was in their slots is cut by now.
  void enter(const int64_t* keys, const int32_t* tables, const int64_t* slot_of) const {
    for (const Miss& miss : misses_) {
      if (slot_of[miss.u] >= 0) slots_.meta[slot_of[miss.u]] = {keys[miss.u], 0, 0, tables[miss.u], 1, 1};
    }
  }

  // Rows to fetch: newcomers, then those that are refreshed.
  Tensor fetch() const {
    Tensor fetch_t = empty<int32_t>({static_cast<int64_t>(misses_.size() + refresh.size())});
    auto* out = data<int32_t>(fetch_t, "fetch");
    for (const Miss& miss : misses_) *out++ = miss.u;
    std::copy(refresh.begin(), refresh.end(), out);
    return fetch_t;
  }

  Tensor counts() const {
    const int64_t all[5] = {static_cast<int64_t>(misses_.size()), evicted_, bypassed_, overflow_, unplaced_};
    return from_values(all, 5);
  }

  std::vector<int32_t> refresh, late, checks;
  std::vector<int64_t> check_clocks;

 private:
  struct Miss {
    uint64_t hash;
    int64_t next;
    int32_t u;
  };
  struct Left {
    int64_t slot, frequency;
  };

  int64_t base_of(uint64_t hash) const { return set_of(hash, n_sets_) * kWays; }
  uint8_t* sketch_of(int64_t base) const { return policy_.sketch + base / kWays * kSketchBytes; }
  bool sees_ahead() const { return kPolicy == Policy::kLookahead && policy_.buckets > 0; }

  // The first coming batch that uses the row after this one, which is taken out of its entry.
  int64_t next_use(uint64_t hash) const {
    if (!sees_ahead()) return kNever;
    ComingUses* uses = find_coming(window_bucket(policy_.window, policy_.buckets, hash), hash);
    if (uses == nullptr) return kNever;
    uses->batches &= ~batch_bit(policy_.tick);
    return uses->batches == 0 ? kNever : first_after(uses->batches, policy_.tick);
  }

  // Pins the slot, and decides whether the row may be used as it is, must be asked about, or fetched again.
  void use(int64_t u, int64_t slot, int32_t table) {
    SlotMeta& meta = slots_.meta[slot];
    const int64_t bound = staleness_[table], to_come = batches_in_flight(meta);
    if (!write_is_fresh(meta.pending, to_come, bound)) {
      // A refresh now resets what was pending; the updates to come of batches in flight may still be too many.
      (to_come <= bound && meta.answers_due == 0 ? refresh : late).push_back(static_cast<int32_t>(u));
      ++meta.answers_due;
    } else if (want_checks_ && meta.answers_due == 0) {
      checks.push_back(static_cast<int32_t>(u));
      check_clocks.push_back(meta.start_clock + meta.pending);
      ++meta.answers_due;
    }
    ++meta.pins;
  }

  // Gives a row that was found the priority of one more use.
  void count(int64_t slot, int64_t next) {
    if constexpr (kPolicy == Policy::kLightLfu) {  // frequent rows' priorities are not even fetched
      if (slots_.meta[slot].pins < kFrequent) to_count_.push_back(slot);
    } else {
      const int64_t frequency = one_use_more(kPolicy, frequency_of(priority_[slot]));
      priority_[slot] = priority_of(kPolicy, frequency, policy_.tick, next) | kPinned;
    }
  }

  // light_lfu: counts the rows that were found and are not frequent.
  void count_found() {
    for (size_t i = 0; i < to_count_.size(); ++i) {
      if (i + kAhead < to_count_.size()) __builtin_prefetch(priority_ + to_count_[i + kAhead], 1);
      const int64_t slot = to_count_[i];
      const int64_t frequency = one_use_more(kPolicy, frequency_of(priority_[slot]));
      priority_[slot] = priority_of(kPolicy, frequency, policy_.tick) | kPinned;
      if (frequency >= kFrequentEnough) slots_.meta[slot].pins += kFrequent;
    }
  }

  uint8_t* tags_;
  int64_t* priority_;
  const PolicyState& policy_;
  const Slots& slots_;
  int64_t n_sets_;
  const int64_t* staleness_;
  bool want_checks_;
  SpillArea* spill_;
  std::vector<Miss> misses_;
  std::vector<Left> left_;
  std::vector<int64_t> to_count_;
  int64_t evicted_ = 0, bypassed_ = 0, overflow_ = 0, unplaced_ = 0;
};

// Calls `run` with the policy as a compile-time constant.
template <typename Run>
auto with_policy(int64_t policy, Run run) {
  switch (static_cast<Policy>(policy)) {
    case Policy::kLru:
      return run.template operator()<Policy::kLru>();
    case Policy::kLfu:
      return run.template operator()<Policy::kLfu>();
    case Policy::kLightLfu:
      return run.template operator()<Policy::kLightLfu>();
    case Policy::kTinyLfu:
      return run.template operator()<Policy::kTinyLfu>();
    case Policy::kLookahead:
      return run.template operator()<Policy::kLookahead>();
  }
  STD_TORCH_CHECK(false, "unknown policy ", policy);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cache_plan(
    Tensor tags_t, Tensor priority_t, Tensor meta_t, Tensor rows_t, Tensor sketch_t, Tensor window_t,
    const Tensor& keys_t, const Tensor& tables_t, int64_t policy_code, int64_t tick, int64_t uses,
    const Tensor& staleness_t, bool want_checks) {
  auto* tags = data<uint8_t>(tags_t, "tags");
  const Slots slots(meta_t, rows_t);
  const auto* keys = data<const int64_t>(keys_t, "keys");
  const auto* tables = data<const int32_t>(tables_t, "tables");
  const auto* staleness = data<const int64_t>(staleness_t, "staleness");
  const int64_t capacity = tags_t.numel();
  const int64_t n = keys_t.numel();
  STD_TORCH_CHECK(capacity > 0 && capacity % kWays == 0 && priority_t.numel() == capacity && slots.n >= capacity,
                  "a cache has a multiple of 32 slots, got ", capacity);
  STD_TORCH_CHECK(tick >= 0 && tick < kLastTick, "tick must be in [0, 2^31 - 1), got ", tick);
  STD_TORCH_CHECK(policy_code >= 0 && policy_code < kPolicies, "unknown policy ", policy_code);
  STD_TORCH_CHECK(!admits(static_cast<Policy>(policy_code)) || sketch_t.numel() == capacity / kWays * kSketchBytes,
                  "this policy needs a sketch of ", kSketchBytes, " bytes a set");
  STD_TORCH_CHECK(window_t.numel() % (2 * kBucketEntries) == 0, "window must be (buckets, ", kBucketEntries, ", 2)");
  for (int64_t u = 0; u < n; ++u) {
    STD_TORCH_CHECK(tables[u] >= 0 && tables[u] < staleness_t.numel(), "table id ", tables[u],
                    " has no staleness bound; ", staleness_t.numel(), " tables are known");
  }
  const PolicyState state{data<int64_t>(priority_t, "priority"), data<uint8_t>(sketch_t, "sketch"),
                          reinterpret_cast<ComingUses*>(data<int64_t>(window_t, "window")),
                          window_t.numel() / (2 * kBucketEntries), tick};

  return with_policy(policy_code, [&]<Policy kPolicy>() {
    std::vector<int64_t> push_from;
    SpillArea spill(slots, capacity);
    spill.sweep(&push_from);
    Tensor slots_out = empty<int64_t>({n});
    auto* slot_of = data<int64_t>(slots_out, "slots");
    Planner<kPolicy> planner(tags, state, slots, capacity, staleness, want_checks, &spill);
    planner.age(uses, n);
    planner.probe(keys, tables, n, slot_of);
    planner.place(slot_of);
    planner.gather(slot_of, &push_from);
    const Push push = cut_push(slots, push_from);
    spill.vacate();
    planner.enter(keys, tables, slot_of);
    return std::tuple{slots_out,
                      planner.fetch(),
                      from_values(planner.late.data(), static_cast<int64_t>(planner.late.size())),
                      from_values(planner.checks.data(), static_cast<int64_t>(planner.checks.size())),
                      from_values(planner.check_clocks.data(), static_cast<int64_t>(planner.check_clocks.size())),
                      push.keys,
                      push.tables,
                      push.starts,
                      push.clocks,
                      push.deltas,
                      planner.counts()};
  });
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
