// The server-side table: rows of one width, hashed by (table id, key), with optimizer state and a clock each.
//
// Rows live in 4096 virtual buckets (the unit of snapshots and of sharding). A bucket is a small open-addressing index
// over rows kept in chunks, so growth moves a few thousand index entries at a time and never a row. Only rows that
// somebody pushed exist; every other row is "fresh": its value follows from (seed, key) alone and costs no memory.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/hash.h"
#include "core/init.h"
#include "core/optimizer.h"
#include "table/arena.h"

namespace hetrec {

// Pushed deltas. `deltas` is (n, width) floats, weights then state; clocks are those of the replica.
struct PushView {
  int64_t n;
  const int32_t* tables;
  const int64_t* keys;
  const int64_t* start_clocks;
  const int64_t* clocks;
  const float* deltas;
};

// Gradients of distinct rows, (n, dim) floats, which a step uses up, and by how much their clocks advance.
struct StepView {
  int64_t n;
  const int32_t* tables;
  const int64_t* keys;
  const int64_t* advances;
  float* gradients;
};

// Rows to be read. `fresh[i]` becomes 1 where nobody wrote the row; `rows` and `clocks` are then left as they are.
struct FetchView {
  int64_t n;
  const int32_t* tables;
  const int64_t* keys;
  float* rows;
  int64_t* clocks;
  uint8_t* fresh;
};

// Rows copied out, one after the other.
struct RowCopies {
  std::vector<int32_t> tables;
  std::vector<int64_t> keys;
  std::vector<int64_t> clocks;
  std::vector<float> rows;
};

class EmbeddingTable {
 public:
  EmbeddingTable(int64_t dim, int64_t state_dim);

  // Declares how the rows of table `table` begin and what trains them. Must come before the first push to it. Throws
  // std::invalid_argument when rows with this optimizer's state are not `width()` wide.
  void declare(int32_t table, const RowInit& init, Optimizer optimizer);

  // Adds deltas to rows, state too, creating the row where it is fresh. A row that would not be finite afterwards stays
  // as it is, its clock too. Throws std::out_of_range before anything is applied when a table was not declared.
  void push(const PushView& push, ClockRule rule);

  // Lets `write(i, values, created)` change each row in place, creating it, with values of no meaning, where it is
  // absent. Tables need not be declared.
  void change(int64_t n, const int32_t* tables, const int64_t* keys,
              const std::function<void(int64_t, float*, bool)>& write);

  // One step of each table's optimizer on its rows, creating the row where it is fresh. A row that would not be finite
  // afterwards keeps its values; its clock advances, as its ranks count the step too. Throws std::out_of_range before
  // anything is applied when a table was not declared.
  void step(const StepView& step, float lr, const OptimizerSettings& settings);

  // Throws std::out_of_range when one of these tables was not declared.
  void require_declared(int64_t n, const int32_t* tables) const;

  // Copies rows out. Changes nothing.
  void fetch(const FetchView& fetch) const;

  // Held while located rows are read: no push comes in between.
  std::shared_lock<std::shared_mutex> read_lock() const { return std::shared_lock(mutex_); }

  // Where rows lie (null: nobody wrote them) and their clocks. The caller holds read_lock().
  void locate(int64_t n, const int32_t* tables, const int64_t* keys, const float** rows, int64_t* clocks) const;

  // Visits located rows in order, with the next ones on their way into the cache.
  template <typename Visit>
  void for_each_located(int64_t n, const float* const* rows, Visit visit) const {
    constexpr int64_t kAhead = 8;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) {
        const auto* bytes = reinterpret_cast<const char*>(rows[i + kAhead]);
        for (int64_t b = 0; b < 4 * width(); b += 64) __builtin_prefetch(bytes + b);
      }
      visit(i, rows[i]);
    }
  }

  // Indices i with c_g(i) > clocks[i] + staleness[i], ascending. Adds every c_g(i) - clocks[i] to `lags` (kLagBins).
  std::vector<int32_t> stale(int64_t n, const int32_t* tables, const int64_t* keys, const int64_t* clocks,
                             const int64_t* staleness, int64_t* lags) const;

  // One bucket's rows, for snapshots: counts, and copies in the order of creation.
  int64_t bucket_size(int64_t bucket) const;
  void export_bucket(int64_t bucket, int32_t* tables, int64_t* keys, int64_t* clocks, float* rows) const;

  // The rows of some tables in buckets [first, last), in the order of buckets and, within one, of creation; as of one
  // instant.
  RowCopies rows_of(int64_t n, const int32_t* tables, int64_t first, int64_t last) const;

  // Sets rows to exact values, creating them where needed (restore); with `skip`, flags by bucket, only where the flag
  // is 0.
  void assign(int64_t n, const int32_t* tables, const int64_t* keys, const int64_t* clocks, const float* rows,
              const uint8_t* skip = nullptr);

  // Forgets every row of these tables: they are fresh again. `skip` as in `assign`. Returns how many there were.
  int64_t erase(int64_t n, const int32_t* tables, const uint8_t* skip = nullptr);

  void clear();

  int64_t dim() const { return dim_; }
  int64_t state_dim() const { return state_dim_; }
  int64_t width() const { return dim_ + state_dim_; }
  int64_t size() const;
  int64_t memory_bytes() const;
  // Rows whose push or step was left out, because they would not be finite.
  int64_t left_out() const {
    const std::shared_lock lock(mutex_);
    return left_out_;
  }

 private:
  static constexpr uint32_t kRowBits = 24;  // index entry: tag in the high 8 bits, row number + 1 in the low 24

  // Aligned as the floats behind it are, so that rows lie without gaps.
  struct [[gnu::packed, gnu::aligned(4)]] RowHeader {
    int64_t key;
    uint64_t table_and_clock;  // 16 bits of table id, 48 bits of clock
  };

  struct Declared {
    bool is_declared = false;
    Optimizer optimizer = Optimizer::kSgd;
    RowInit init;
  };

  struct Bucket {
    uint32_t* index = nullptr;
    uint32_t index_size = 0;  // a power of two, or 0
    uint32_t count = 0;
    std::vector<std::byte*> chunks;
  };

  static int32_t table_of(const RowHeader& h) { return static_cast<int32_t>(h.table_and_clock >> 48); }
  static int64_t clock_of(const RowHeader& h) { return static_cast<int64_t>(h.table_and_clock & 0xffffffffffffULL); }
  static void set_clock(RowHeader& h, int64_t clock) {
    h.table_and_clock = (h.table_and_clock & ~0xffffffffffffULL) | (static_cast<uint64_t>(clock) & 0xffffffffffffULL);
  }

  uint32_t chunk_rows() const { return 1u << chunk_shift_; }
  RowHeader* row_at(const Bucket& bucket, uint32_t row) const {
    return reinterpret_cast<RowHeader*>(bucket.chunks[row >> chunk_shift_] + (row & (chunk_rows() - 1)) * stride_);
  }
  static float* values_of(RowHeader* header) { return reinterpret_cast<float*>(header + 1); }

  static uint32_t home_of(uint64_t hash, const Bucket& bucket) {
    return static_cast<uint32_t>(hash >> 8) & (bucket.index_size - 1);
  }
  void prefetch_index(uint64_t hash) const;
  // The row whose tag matches first, for prefetching only: it may be another row.
  const RowHeader* likely_row(uint64_t hash) const;
  RowHeader* find(uint64_t hash, int32_t table, int64_t key) const;
  RowHeader* find_or_create(uint64_t hash, int32_t table, int64_t key, bool* created);
  void grow(Bucket& bucket);
  // Makes `index`, of `size` entries, the bucket's, and enters its rows.
  void reindex(Bucket& bucket, uint32_t* index, uint32_t size) const;
  void check_declared(int64_t n, const int32_t* tables) const;

  // Visits rows in the given order with index and row already on their way into the cache.
  template <typename Visit>
  void for_each_prefetched(int64_t n, const int32_t* tables, const int64_t* keys, Visit visit) const;

  int64_t dim_;
  int64_t state_dim_;
  int64_t stride_;        // bytes a row
  uint32_t chunk_shift_;  // log2 of rows a chunk
  Arena arena_;
  std::vector<Bucket> buckets_;
  std::vector<Declared> declared_;  // by table id
  int64_t left_out_ = 0;
  mutable std::shared_mutex mutex_;
};

}  // namespace hetrec
