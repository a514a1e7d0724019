#include "table/embedding_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace hetrec {

namespace {
constexpr int64_t kBlock = 32;        // rows in flight while prefetching
constexpr uint32_t kFirstIndex = 16;  // index entries of a bucket's first allocation
constexpr int64_t kCacheLine = 64;

// By table id, whether it is one of `tables`, which are below `size`.
std::vector<bool> flags_of(int64_t n, const int32_t* tables, size_t size) {
  std::vector<bool> flags(size);
  for (int64_t i = 0; i < n; ++i) flags[static_cast<size_t>(tables[i])] = true;
  return flags;
}
}  // namespace

EmbeddingTable::EmbeddingTable(int64_t dim, int64_t state_dim) : dim_(dim), state_dim_(state_dim), buckets_(kBuckets) {
  if (dim < 1 || state_dim < 0) {
    throw std::invalid_argument("a table needs dim >= 1 and state_dim >= 0, got dim " + std::to_string(dim) +
                                ", state_dim " + std::to_string(state_dim));
  }
  stride_ = static_cast<int64_t>(sizeof(RowHeader) + sizeof(float) * (dim + state_dim));
  // Each bucket's last chunk is half empty on average, which counts when rows are long. 16 rows are a multiple of the
  // arena's 64 bytes.
  chunk_shift_ = stride_ > 128 ? 4 : 5;
}

void EmbeddingTable::declare(int32_t table, const RowInit& init, Optimizer optimizer) {
  if (table < 0 || table >= 1 << 16) {
    throw std::out_of_range("table id " + std::to_string(table) + " is outside 0..65535");
  }
  if (state_dim_of(optimizer, dim_) != state_dim_) {
    throw std::invalid_argument("rows of " + std::to_string(dim_) + " weights have " +
                                std::to_string(state_dim_of(optimizer, dim_)) + " values of state with optimizer " +
                                std::to_string(static_cast<int32_t>(optimizer)) + ", not " +
                                std::to_string(state_dim_));
  }
  const std::unique_lock lock(mutex_);
  const auto index = static_cast<size_t>(table);
  if (index >= declared_.size()) declared_.resize(index + 1);
  declared_[index] = {true, optimizer, init};
}

void EmbeddingTable::check_declared(int64_t n, const int32_t* tables) const {
  for (int64_t i = 0; i < n; ++i) {
    const auto table = static_cast<size_t>(tables[i]);
    if (tables[i] < 0 || table >= declared_.size() || !declared_[table].is_declared) {
      throw std::out_of_range("table id " + std::to_string(tables[i]) +
                              " was not opened; open() it before the exchange");
    }
  }
}

void EmbeddingTable::require_declared(int64_t n, const int32_t* tables) const {
  const std::shared_lock lock(mutex_);
  check_declared(n, tables);
}

void EmbeddingTable::prefetch_index(uint64_t hash) const {
  const Bucket& bucket = buckets_[bucket_of(hash)];
  if (bucket.index != nullptr) __builtin_prefetch(&bucket.index[home_of(hash, bucket)]);
}

const EmbeddingTable::RowHeader* EmbeddingTable::likely_row(uint64_t hash) const {
  const Bucket& bucket = buckets_[bucket_of(hash)];
  if (bucket.index == nullptr) return nullptr;
  const uint32_t mask = bucket.index_size - 1;
  for (uint32_t i = home_of(hash, bucket);; i = (i + 1) & mask) {
    const uint32_t entry = bucket.index[i];
    if (entry == 0) return nullptr;
    if (entry >> kRowBits == tag_of(hash)) return row_at(bucket, (entry & ((1u << kRowBits) - 1)) - 1);
  }
}

EmbeddingTable::RowHeader* EmbeddingTable::find(uint64_t hash, int32_t table, int64_t key) const {
  const Bucket& bucket = buckets_[bucket_of(hash)];
  if (bucket.index == nullptr) return nullptr;
  const uint32_t mask = bucket.index_size - 1;
  for (uint32_t i = home_of(hash, bucket);; i = (i + 1) & mask) {
    const uint32_t entry = bucket.index[i];
    if (entry == 0) return nullptr;
    if (entry >> kRowBits != tag_of(hash)) continue;
    RowHeader* header = row_at(bucket, (entry & ((1u << kRowBits) - 1)) - 1);
    if (header->key == key && table_of(*header) == table) return header;
  }
}

void EmbeddingTable::reindex(Bucket& bucket, uint32_t* index, uint32_t size) const {
  std::fill_n(index, size, 0u);
  const uint32_t mask = size - 1;
  for (uint32_t row = 0; row < bucket.count; ++row) {
    const RowHeader* header = row_at(bucket, row);
    const uint64_t hash = hash_row(table_of(*header), header->key);
    uint32_t i = static_cast<uint32_t>(hash >> 8) & mask;
    while (index[i] != 0) i = (i + 1) & mask;
    index[i] = static_cast<uint32_t>(tag_of(hash)) << kRowBits | (row + 1);
  }
  bucket.index = index;
  bucket.index_size = size;
}

void EmbeddingTable::grow(Bucket& bucket) {
  const uint32_t size = std::max(kFirstIndex, bucket.index_size * 2);
  if (size > 1u << kRowBits) throw std::length_error("a bucket is full: more than 2^23 rows in one of 4096 buckets");
  uint32_t* outgrown = bucket.index;
  const uint32_t outgrown_size = bucket.index_size;
  reindex(bucket, static_cast<uint32_t*>(arena_.allocate(size * sizeof(uint32_t))), size);
  if (outgrown != nullptr) arena_.recycle(outgrown, outgrown_size * sizeof(uint32_t));
}

EmbeddingTable::RowHeader* EmbeddingTable::find_or_create(uint64_t hash, int32_t table, int64_t key, bool* created) {
  if (RowHeader* header = find(hash, table, key)) {
    *created = false;
    return header;
  }
  Bucket& bucket = buckets_[bucket_of(hash)];
  if (uint64_t{bucket.count} * 8 >= uint64_t{bucket.index_size} * 7) grow(bucket);
  if ((bucket.count & (chunk_rows() - 1)) == 0) {
    bucket.chunks.push_back(static_cast<std::byte*>(arena_.allocate(static_cast<size_t>(chunk_rows() * stride_))));
  }
  const uint32_t mask = bucket.index_size - 1;
  uint32_t i = home_of(hash, bucket);
  while (bucket.index[i] != 0) i = (i + 1) & mask;
  const uint32_t row = bucket.count++;
  bucket.index[i] = static_cast<uint32_t>(tag_of(hash)) << kRowBits | (row + 1);
  RowHeader* header = row_at(bucket, row);
  header->key = key;
  header->table_and_clock = static_cast<uint64_t>(table) << 48;
  *created = true;
  return header;
}

template <typename Visit>
void EmbeddingTable::for_each_prefetched(int64_t n, const int32_t* tables, const int64_t* keys, Visit visit) const {
  uint64_t hashes[2][kBlock];
  const auto start_block = [&](int64_t begin, uint64_t* hash) {
    const int64_t end = std::min(n, begin + kBlock);
    for (int64_t i = begin; i < end; ++i) {
      hash[i - begin] = hash_row(tables[i], keys[i]);
      prefetch_index(hash[i - begin]);
    }
  };
  start_block(0, hashes[0]);
  int now = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock, now ^= 1) {
    const int64_t end = std::min(n, begin + kBlock);
    for (int64_t i = begin; i < end; ++i) {
      if (const RowHeader* row = likely_row(hashes[now][i - begin])) {
        const auto* bytes = reinterpret_cast<const char*>(row);
        for (int64_t b = 0; b < stride_ + kCacheLine - 1; b += kCacheLine) __builtin_prefetch(bytes + b);
      }
    }
    start_block(begin + kBlock, hashes[now ^ 1]);
    for (int64_t i = begin; i < end; ++i) visit(i, hashes[now][i - begin]);
  }
}

void EmbeddingTable::push(const PushView& push, ClockRule rule) {
  const std::unique_lock lock(mutex_);
  check_declared(push.n, push.tables);
  const int64_t width = this->width();
  for_each_prefetched(push.n, push.tables, push.keys, [&](int64_t i, uint64_t hash) {
    bool created = false;
    RowHeader* header = find_or_create(hash, push.tables[i], push.keys[i], &created);
    float* values = values_of(header);
    const Declared& table = declared_[static_cast<size_t>(push.tables[i])];
    if (created) init_row(table.init, push.keys[i], dim_, state_dim_, values);
    const float* delta = push.deltas + i * width;
    int bad = 0;
    for (int64_t d = 0; d < width; ++d) bad |= !std::isfinite(values[d] + delta[d]);
    if (bad) {
      ++left_out_;
      return;
    }
    for (int64_t d = 0; d < width; ++d) values[d] += delta[d];
    clamp_merged_state(table.optimizer, values + dim_, dim_);
    set_clock(*header, merge_clock(rule, clock_of(*header), push.start_clocks[i], push.clocks[i]));
  });
}

void EmbeddingTable::change(int64_t n, const int32_t* tables, const int64_t* keys,
                            const std::function<void(int64_t, float*, bool)>& write) {
  const std::unique_lock lock(mutex_);
  for_each_prefetched(n, tables, keys, [&](int64_t i, uint64_t hash) {
    bool created = false;
    RowHeader* header = find_or_create(hash, tables[i], keys[i], &created);
    write(i, values_of(header), created);
  });
}

void EmbeddingTable::step(const StepView& step, float lr, const OptimizerSettings& settings) {
  const std::unique_lock lock(mutex_);
  check_declared(step.n, step.tables);
  std::vector<float> before(static_cast<size_t>(2 * width()));
  for_each_prefetched(step.n, step.tables, step.keys, [&](int64_t i, uint64_t hash) {
    bool created = false;
    RowHeader* header = find_or_create(hash, step.tables[i], step.keys[i], &created);
    float* values = values_of(header);
    const Declared& table = declared_[static_cast<size_t>(step.tables[i])];
    if (created) init_row(table.init, step.keys[i], dim_, state_dim_, values);
    const RowRef row{values, values + dim_};
    float* gradient = step.gradients + i * dim_;
    bool made = false;
    switch (table.optimizer) {
      case Optimizer::kSgd:
        made = try_step_row<Optimizer::kSgd, false>(row, gradient, dim_, lr, settings, before.data());
        break;
      case Optimizer::kAdagrad:
        made = try_step_row<Optimizer::kAdagrad, false>(row, gradient, dim_, lr, settings, before.data());
        break;
      case Optimizer::kRowwiseAdagrad:
        made = try_step_row<Optimizer::kRowwiseAdagrad, false>(row, gradient, dim_, lr, settings, before.data());
        break;
      case Optimizer::kAdam:
        made = try_step_row<Optimizer::kAdam, false>(row, gradient, dim_, lr, settings, before.data());
        break;
    }
    if (!made) ++left_out_;
    set_clock(*header, clock_of(*header) + step.advances[i]);
  });
}

void EmbeddingTable::fetch(const FetchView& fetch) const {
  const std::shared_lock lock(mutex_);
  check_declared(fetch.n, fetch.tables);
  const int64_t width = this->width();
  for_each_prefetched(fetch.n, fetch.tables, fetch.keys, [&](int64_t i, uint64_t hash) {
    RowHeader* header = find(hash, fetch.tables[i], fetch.keys[i]);
    fetch.fresh[i] = header == nullptr;
    if (header == nullptr) return;
    fetch.clocks[i] = clock_of(*header);
    std::memcpy(fetch.rows + i * width, values_of(header), sizeof(float) * static_cast<size_t>(width));
  });
}

void EmbeddingTable::locate(int64_t n, const int32_t* tables, const int64_t* keys, const float** rows,
                            int64_t* clocks) const {
  check_declared(n, tables);
  for_each_prefetched(n, tables, keys, [&](int64_t i, uint64_t hash) {
    RowHeader* header = find(hash, tables[i], keys[i]);
    rows[i] = header == nullptr ? nullptr : values_of(header);
    clocks[i] = header == nullptr ? 0 : clock_of(*header);
  });
}

std::vector<int32_t> EmbeddingTable::stale(int64_t n, const int32_t* tables, const int64_t* keys, const int64_t* clocks,
                                           const int64_t* staleness, int64_t* lags) const {
  const std::shared_lock lock(mutex_);
  check_declared(n, tables);
  std::vector<int32_t> result;
  for_each_prefetched(n, tables, keys, [&](int64_t i, uint64_t hash) {
    const RowHeader* header = find(hash, tables[i], keys[i]);
    const int64_t global = header == nullptr ? 0 : clock_of(*header);
    ++lags[lag_bin(global - clocks[i])];
    if (header != nullptr && !read_is_fresh(global, clocks[i], staleness[i])) result.push_back(static_cast<int32_t>(i));
  });
  return result;
}

int64_t EmbeddingTable::bucket_size(int64_t bucket) const {
  const std::shared_lock lock(mutex_);
  return buckets_.at(static_cast<size_t>(bucket)).count;
}

void EmbeddingTable::export_bucket(int64_t bucket, int32_t* tables, int64_t* keys, int64_t* clocks, float* rows) const {
  const std::shared_lock lock(mutex_);
  const Bucket& source = buckets_.at(static_cast<size_t>(bucket));
  for (uint32_t row = 0; row < source.count; ++row) {
    RowHeader* header = row_at(source, row);
    tables[row] = table_of(*header);
    keys[row] = header->key;
    clocks[row] = clock_of(*header);
    std::memcpy(rows + row * width(), values_of(header), sizeof(float) * static_cast<size_t>(width()));
  }
}

RowCopies EmbeddingTable::rows_of(int64_t n, const int32_t* tables, int64_t first, int64_t last) const {
  const std::shared_lock lock(mutex_);
  check_declared(n, tables);
  if (first < 0 || first > last || last > kBuckets) {
    throw std::out_of_range("buckets " + std::to_string(first) + " to " + std::to_string(last) + " of " +
                            std::to_string(kBuckets));
  }
  const std::vector<bool> wanted = flags_of(n, tables, declared_.size());
  RowCopies copies;
  for (int64_t b = first; b < last; ++b) {
    const Bucket& bucket = buckets_[static_cast<size_t>(b)];
    for (uint32_t row = 0; row < bucket.count; ++row) {
      RowHeader* header = row_at(bucket, row);
      if (!wanted[static_cast<size_t>(table_of(*header))]) continue;
      copies.tables.push_back(table_of(*header));
      copies.keys.push_back(header->key);
      copies.clocks.push_back(clock_of(*header));
      copies.rows.insert(copies.rows.end(), values_of(header), values_of(header) + width());
    }
  }
  return copies;
}

void EmbeddingTable::assign(int64_t n, const int32_t* tables, const int64_t* keys, const int64_t* clocks,
                            const float* rows, const uint8_t* skip) {
  const std::unique_lock lock(mutex_);
  check_declared(n, tables);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = hash_row(tables[i], keys[i]);
    if (skip != nullptr && skip[bucket_of(hash)] != 0) continue;
    bool created = false;
    RowHeader* header = find_or_create(hash, tables[i], keys[i], &created);
    set_clock(*header, clocks[i]);
    std::memcpy(values_of(header), rows + i * width(), sizeof(float) * static_cast<size_t>(width()));
  }
}

int64_t EmbeddingTable::erase(int64_t n, const int32_t* tables, const uint8_t* skip) {
  const std::unique_lock lock(mutex_);
  check_declared(n, tables);
  const std::vector<bool> erased = flags_of(n, tables, declared_.size());
  int64_t count = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (skip != nullptr && skip[b] != 0) continue;
    Bucket& bucket = buckets_[b];
    uint32_t kept = 0;
    for (uint32_t row = 0; row < bucket.count; ++row) {
      RowHeader* header = row_at(bucket, row);
      if (erased[static_cast<size_t>(table_of(*header))]) continue;
      if (kept != row) std::memcpy(row_at(bucket, kept), header, static_cast<size_t>(stride_));
      ++kept;
    }
    if (kept == bucket.count) continue;
    count += bucket.count - kept;
    bucket.count = kept;
    while (bucket.chunks.size() > (kept + chunk_rows() - 1) >> chunk_shift_) {
      arena_.recycle(bucket.chunks.back(), static_cast<size_t>(chunk_rows() * stride_));
      bucket.chunks.pop_back();
    }
    reindex(bucket, bucket.index, bucket.index_size);
  }
  return count;
}

void EmbeddingTable::clear() {
  const std::unique_lock lock(mutex_);
  for (Bucket& bucket : buckets_) bucket = Bucket{};
  arena_.clear();
}

int64_t EmbeddingTable::size() const {
  const std::shared_lock lock(mutex_);
  int64_t rows = 0;
  for (const Bucket& bucket : buckets_) rows += bucket.count;
  return rows;
}

int64_t EmbeddingTable::memory_bytes() const {
  const std::shared_lock lock(mutex_);
  int64_t bytes = static_cast<int64_t>(sizeof(Bucket) * buckets_.size());
  for (const Bucket& bucket : buckets_) {
    bytes += static_cast<int64_t>(bucket.index_size * sizeof(uint32_t));
    bytes += static_cast<int64_t>(bucket.chunks.capacity() * sizeof(bucket.chunks[0]));
    bytes += static_cast<int64_t>(bucket.chunks.size()) * chunk_rows() * stride_;
  }
  return bytes;
}

}  // namespace hetrec
