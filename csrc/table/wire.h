// The exchange protocol's frames (cache_backend/PROTOCOL.md): bit-packed integers, encoded rows, checksums.
//
// A frame is checked as a whole before any of it is used: what is cut, garbled or of another version throws WireError.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/row_codec.h"
#include "table/embedding_table.h"
#include "table/residuals.h"
#include "table/rounds.h"

namespace hetrec {

constexpr uint16_t kProtocolVersion = 2;

struct WireError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// What a request pushes.
enum class PushKind : uint32_t { kDeltas = 0, kGradients = 1 };

// Everything of a request but its arrays.
struct RequestHeader {
  uint32_t magic;
  uint32_t push_crc;   // of the bytes from `version` to the end of the push part
  uint32_t query_crc;  // of the query part
  uint16_t version;
  uint8_t push_codec;
  uint8_t fetch_codec;
  uint32_t dim;
  uint32_t state_dim;
  uint32_t n_push;
  uint32_t n_check;
  uint32_t n_fetch;
  PushKind kind;
  uint32_t reserved[2];
  uint64_t generation;
  uint64_t worker;
  uint64_t session;
  uint64_t sequence;
  uint64_t push_bytes;
  uint64_t query_bytes;
};
static_assert(sizeof(RequestHeader) == 96);

// What stands before gradients: whose share of which synchronous step they are, and how to step.
struct RoundHeader {
  uint64_t group;   // the ranks that step together
  uint64_t number;  // of the round: 1, 2, ...
  uint32_t rank, ranks;
  uint32_t more;     // 1: the next frame of the stream goes on with this share
  uint32_t wait_ms;  // how long the answer may wait for the other ranks
  float lr;
  OptimizerSettings settings;
  uint32_t reserved;
};
static_assert(sizeof(RoundHeader) == 64);

struct ReplyHeader {
  uint32_t magic;
  uint32_t crc;  // of the bytes from `version` to the end
  uint16_t version;
  uint8_t codec;
  uint8_t reserved;
  uint32_t dim;
  uint32_t state_dim;
  uint32_t n_fetch;
  uint32_t n_written;
  uint32_t n_stale;
  uint64_t generation;
  uint64_t sequence;
};
static_assert(sizeof(ReplyHeader) == 48);

struct CheckView {
  int64_t n;
  const int32_t* tables;
  const int64_t* keys;
  const int64_t* clocks;
  const int64_t* staleness;
};

struct RowNames {
  int64_t n;
  const int32_t* tables;
  const int64_t* keys;
};

// Vectors that leave what they grow by uninitialised: frames are megabytes, and every byte is written anyway.
template <typename T>
struct Uninitialised : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = Uninitialised<U>;
  };
  template <typename U, typename... Args>
  void construct(U* at, Args&&... args) {
    if constexpr (sizeof...(Args) == 0) {
      ::new (static_cast<void*>(at)) U;
    } else {
      ::new (static_cast<void*>(at)) U(std::forward<Args>(args)...);
    }
  }
};
template <typename T>
using Buffer = std::vector<T, Uninitialised<T>>;

using Frame = Buffer<uint8_t>;

// CRC-32C, as frames carry it.
uint32_t checksum(const uint8_t* bytes, size_t size);

// Writes a request. Counts, sizes and checksums of `header` are filled in. With `places`, push i's delta is the one
// there, not the one at i. With `residuals`, which must be for this
// codec and row format, what the codec rounds off is kept there and what was kept is sent.
Frame encode_request(RequestHeader header, const PushView& push, const CheckView& check, const RowNames& fetch,
                     const int64_t* places = nullptr, Residuals* residuals = nullptr);

// The same with gradients, `push.deltas` (n, dim); of `push` the clocks are not used.
Frame encode_share(RequestHeader header, const RoundHeader& round, const PushView& push, const CheckView& check,
                   const RowNames& fetch);

// A request that was checked as a whole, decoded.
struct Request {
  RequestHeader header;
  RoundHeader round;  // zeros where the pushes are deltas
  Buffer<int32_t> push_tables;
  Buffer<int64_t> push_keys, push_clocks, push_starts;  // gradients have no clocks
  Buffer<float> decoded;                                // the pushed rows; empty where the frame's own bytes serve
  const float* deltas;  // or gradients; in `decoded`, or in the frame, which must then outlive this
  Buffer<int32_t> check_tables;
  Buffer<int64_t> check_keys, check_clocks, check_staleness;
  Buffer<int32_t> fetch_tables;
  Buffer<int64_t> fetch_keys;
};

// Checks a frame's structure and both checksums. A request about more than `max_rows` rows is refused before room is
// made for them: a few bytes can announce any number.
Request parse_request(const uint8_t* frame, size_t size, uint64_t max_rows);

// The part of a parsed request's frame that changes rows, for the log: header and push part, with nothing to query.
Frame push_part(const RequestHeader& header, const uint8_t* frame);

// Throws std::out_of_range when a request names a table that was not declared.
void check_tables(const EmbeddingTable& table, const Request& request);

// Applies a request's deltas. With `skip`, kBuckets flags, only to rows of buckets whose flag is 0: a snapshot taken
// while pushes went on holds some buckets before and some after a push.
void apply_push(EmbeddingTable& table, const Request& request, ClockRule rule, const uint8_t* skip = nullptr);

// Applies a round: the gradients of all its shares, rank after rank, a share's frames one after the other.
void apply_round(EmbeddingTable& table, const std::vector<const Request*>& shares, const uint8_t* skip = nullptr);

// Answers a request's checks and fetches.
Frame answer(const EmbeddingTable& table, const Request& request, uint64_t generation);

struct Reply {
  ReplyHeader header;
  Buffer<uint8_t> fresh;   // n_fetch
  Buffer<int64_t> clocks;  // n_fetch; fresh ones mean nothing
  Buffer<float> rows;      // n_fetch x width; fresh ones mean nothing
  const float* view;       // the rows in the frame itself, where they lie there as they are; then `rows` is empty
  Buffer<int64_t> lags;    // kLagBins
  Buffer<int32_t> stale;
  Buffer<int64_t> stale_clocks;
  Buffer<float> stale_rows;
};
Reply decode_reply(const uint8_t* frame, size_t size);

}  // namespace hetrec
