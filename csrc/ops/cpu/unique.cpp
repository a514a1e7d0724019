// check_keys and unique_rows.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/hash.h"
#include "ops/cpu/tensors.h"

namespace hetrec {
namespace {

Tensor check_keys(const Tensor& keys, const Tensor& feature_splits, const Tensor& feature_rows) {
  const auto* key = data<const int64_t>(keys, "keys");
  const auto* split = data<const int64_t>(feature_splits, "feature_splits");
  const auto* rows = data<const int64_t>(feature_rows, "feature_rows");
  int64_t bad = -1;
  for (int64_t f = 0; f < feature_rows.numel() && bad < 0; ++f) {
    if (rows[f] == 0) continue;
    const auto limit = static_cast<uint64_t>(rows[f]);
    bool any = false;  // a first pass without an exit vectorises
    for (int64_t i = split[f]; i < split[f + 1]; ++i) any |= static_cast<uint64_t>(key[i]) >= limit;
    for (int64_t i = split[f]; any && bad < 0 && i < split[f + 1]; ++i) {
      if (static_cast<uint64_t>(key[i]) >= limit) bad = i;
    }
  }
  return from_values(&bad, 1);
}

// Open addressing over (32 hash bits, row + 1) packed into one word: most comparisons end without touching a key.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> unique_rows(const Tensor& keys, const Tensor& feature_splits,
                                                               const Tensor& feature_tables) {
  const auto* key = data<const int64_t>(keys, "keys");
  const auto* split = data<const int64_t>(feature_splits, "feature_splits");
  const auto* feature_table = data<const int32_t>(feature_tables, "feature_tables");
  const int64_t n = keys.numel();
  const int64_t n_features = feature_tables.numel();
  STD_TORCH_CHECK(n < INT32_MAX, "a batch has ", n, " keys; at most 2^31 - 2 are possible");
  STD_TORCH_CHECK(feature_splits.numel() == n_features + 1, "feature_splits must have one entry more than features");
  STD_TORCH_CHECK(n_features == 0 ? n == 0 : split[0] == 0 && split[n_features] == n,
                  "feature_splits do not cover the keys");

  thread_local std::vector<uint64_t> index;  // kept between calls: a batch needs the same room every time
  thread_local std::vector<int64_t> unique_keys;
  thread_local std::vector<int32_t> unique_tables, counts;
  size_t size = 64;
  while (size < static_cast<size_t>(2 * n)) size *= 2;
  index.assign(size, 0);
  unique_keys.resize(static_cast<size_t>(n));
  unique_tables.resize(static_cast<size_t>(n));
  counts.resize(static_cast<size_t>(n));
  const uint64_t mask = size - 1;

  Tensor inverse_t = empty<int32_t>({n});
  auto* inverse = data<int32_t>(inverse_t, "inverse");
  int32_t n_unique = 0;
  constexpr int64_t kBlock = 16;
  uint64_t hashes[kBlock];
  for (int64_t f = 0; f < n_features; ++f) {
    const int32_t table = feature_table[f];
    for (int64_t begin = split[f]; begin < split[f + 1]; begin += kBlock) {
      const int64_t end = std::min(split[f + 1], begin + kBlock);
      for (int64_t i = begin; i < end; ++i) {
        hashes[i - begin] = hash_row(table, key[i]);
        __builtin_prefetch(&index[hashes[i - begin] & mask]);
      }
      for (int64_t i = begin; i < end; ++i) {
        const uint64_t hash = hashes[i - begin];
        const uint64_t high = hash & 0xffffffff00000000ULL;
        for (uint64_t at = hash & mask;; at = (at + 1) & mask) {
          const uint64_t entry = index[at];
          if (entry == 0) {
            index[at] = high | static_cast<uint32_t>(n_unique + 1);
            unique_keys[static_cast<size_t>(n_unique)] = key[i];
            unique_tables[static_cast<size_t>(n_unique)] = table;
            counts[static_cast<size_t>(n_unique)] = 1;
            inverse[i] = n_unique++;
            break;
          }
          if ((entry & 0xffffffff00000000ULL) != high) continue;
          const auto row = static_cast<size_t>(static_cast<uint32_t>(entry)) - 1;
          if (unique_keys[row] == key[i] && unique_tables[row] == table) {
            ++counts[row];
            inverse[i] = static_cast<int32_t>(row);
            break;
          }
        }
      }
    }
  }

  Tensor splits_t = empty<int32_t>({n_unique + 1});
  Tensor order_t = empty<int32_t>({n});
  auto* splits = data<int32_t>(splits_t, "splits");
  auto* order = data<int32_t>(order_t, "order");
  int32_t sum = 0;
  for (int32_t u = 0; u < n_unique; ++u) {
    splits[u] = sum;
    sum += counts[static_cast<size_t>(u)];
    counts[static_cast<size_t>(u)] = splits[u];
  }
  splits[n_unique] = sum;
  for (int64_t i = 0; i < n; ++i) order[counts[static_cast<size_t>(inverse[i])]++] = static_cast<int32_t>(i);
  return {from_values(unique_keys.data(), n_unique), from_values(unique_tables.data(), n_unique), inverse_t, order_t,
          splits_t};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hetrec, CPU, m) {
  m.impl("check_keys", TORCH_BOX(&check_keys));
  m.impl("unique_rows", TORCH_BOX(&unique_rows));
}

}  // namespace hetrec
