#include "table/wire.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>

#include "core/crc32c.h"

namespace hetrec {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

namespace {

constexpr uint32_t kRequestMagic = 0x51544548;  // "HETQ"
constexpr uint32_t kReplyMagic = 0x52544548;    // "HETR"
constexpr uint32_t kMostRanks = 1 << 16;
constexpr size_t kPushCrcFrom = offsetof(RequestHeader, version);
constexpr size_t kReplyCrcFrom = offsetof(ReplyHeader, version);

size_t aligned(size_t bytes) { return (bytes + 7) / 8 * 8; }

// Grows the frame to `size`, and with zeros to the next multiple of 8.
void pad(Frame* frame, size_t size) {
  frame->resize(aligned(size));
  std::fill(frame->begin() + static_cast<int64_t>(size), frame->end(), uint8_t{0});
}

struct BlockHeader {
  int64_t base;
  uint8_t bits;
  uint8_t zero[7];
};
static_assert(sizeof(BlockHeader) == 16);

// n integers as (value - base) in the fewest bits that hold the largest, packed into 64-bit words.
template <typename T>
void write_block(Frame* frame, int64_t n, const T* values) {
  int64_t low = n ? values[0] : 0, high = low;
  for (int64_t i = 0; i < n; ++i) {
    low = std::min<int64_t>(low, values[i]);
    high = std::max<int64_t>(high, values[i]);
  }
  const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  const BlockHeader header{low, static_cast<uint8_t>(std::bit_width(range)), {}};
  const size_t words = (static_cast<size_t>(n) * header.bits + 63) / 64;
  const size_t at = frame->size();
  frame->resize(at + sizeof(header) + 8 * words);
  std::memcpy(frame->data() + at, &header, sizeof(header));
  uint8_t* out = frame->data() + at + sizeof(header);
  uint64_t word = 0;
  unsigned used = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t delta = static_cast<uint64_t>(static_cast<int64_t>(values[i])) - static_cast<uint64_t>(low);
    word |= delta << used;
    if (used + header.bits >= 64) {
      std::memcpy(out, &word, 8);
      out += 8;
      word = used == 0 ? 0 : delta >> (64 - used);
      used = used + header.bits - 64;
    } else {
      used += header.bits;
    }
  }
  if (used > 0) std::memcpy(out, &word, 8);
}

// Reads a frame front to back; never past its end.
class Reader {
 public:
  Reader(const uint8_t* at, size_t size) : at_(at), left_(size) {}

  const uint8_t* take(size_t bytes) {
    if (bytes > left_)
      throw WireError("the frame ends early: a section needs " + std::to_string(bytes) + " bytes, " +
                      std::to_string(left_) + " are left");
    const uint8_t* here = at_;
    at_ += bytes;
    left_ -= bytes;
    return here;
  }

  template <typename T>
  Buffer<T> block(size_t n) {
    BlockHeader header;
    std::memcpy(&header, take(sizeof(header)), sizeof(header));
    if (header.bits > 64) throw WireError("a section packs values of " + std::to_string(header.bits) + " bits");
    const uint8_t* in = take((n * header.bits + 63) / 64 * 8);
    Buffer<T> values(n);
    const uint64_t mask = header.bits == 64 ? ~uint64_t{0} : (uint64_t{1} << header.bits) - 1;
    size_t bit = 0;
    for (size_t i = 0; i < n; ++i, bit += header.bits) {
      uint64_t value = 0;
      if (header.bits > 0) {
        uint64_t word;
        std::memcpy(&word, in + bit / 64 * 8, 8);
        const unsigned shift = bit % 64;
        value = word >> shift;
        if (shift + header.bits > 64) {
          std::memcpy(&word, in + bit / 64 * 8 + 8, 8);
          value |= word << (64 - shift);
        }
      }
      values[i] = static_cast<T>(static_cast<int64_t>(static_cast<uint64_t>(header.base) + (value & mask)));
    }
    return values;
  }

  void expect_end() const {
    if (left_ != 0) throw WireError(std::to_string(left_) + " bytes too many in a frame");
  }

 private:
  const uint8_t* at_;
  size_t left_;
};

RowCodec codec_of(uint8_t code) {
  if (code >= kRowCodecs) throw WireError("unknown row codec " + std::to_string(code));
  return static_cast<RowCodec>(code);
}

void check_version(uint16_t version) {
  if (version != kProtocolVersion) {
    throw WireError("protocol version " + std::to_string(version) + ", this side speaks " +
                    std::to_string(kProtocolVersion) + "; run the same release of hetrec on both sides");
  }
}

void write_rows(Frame* frame, RowCodec codec, int64_t dim, int64_t state_dim, int64_t n, const float* rows,
                const int64_t* places) {
  const auto bytes = static_cast<size_t>(encoded_row_bytes(codec, dim, state_dim));
  const size_t at = frame->size();
  pad(frame, at + bytes * static_cast<size_t>(n));
  uint8_t* out = frame->data() + at;
  if (codec == RowCodec::kFp32 && places == nullptr) {
    if (n > 0) std::memcpy(out, rows, bytes * static_cast<size_t>(n));
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float* row = rows + (places == nullptr ? i : places[i]) * (dim + state_dim);
    encode_row(codec, row, dim, state_dim, out + static_cast<size_t>(i) * bytes);
  }
}

void check_tables(const Buffer<int32_t>& tables) {
  for (const int32_t table : tables) {
    if (table < 0 || table >= 1 << 16) throw WireError("table id " + std::to_string(table) + " is outside 0..65535");
  }
}

// A row keeps 48 bits of its clock; larger ones would also overflow where clocks are compared.
void check_clock(int64_t clock) {
  if (clock < 0 || clock >= int64_t{1} << 48) throw WireError("clock " + std::to_string(clock) + " is outside 48 bits");
}

void check_round(const RoundHeader& round) {
  if (round.number == 0) throw WireError("rounds are numbered from 1, not from 0");
  if (round.ranks > kMostRanks || round.rank >= round.ranks) {
    throw WireError("a round's rank " + std::to_string(round.rank) + " of " + std::to_string(round.ranks) +
                    " is none; there may be " + std::to_string(kMostRanks));
  }
  if (round.more > 1) throw WireError("a share says that " + std::to_string(round.more) + " frames follow");
  const OptimizerSettings& s = round.settings;
  for (const float value : {round.lr, s.eps, s.weight_decay, s.max_gradient, s.max_gradient_norm}) {
    if (!(value >= 0.f && std::isfinite(value))) {
      throw WireError("a round's learning rate or setting is " + std::to_string(value));
    }
  }
  for (const float beta : {s.beta1, s.beta2}) {
    if (!(beta >= 0.f && beta < 1.f)) throw WireError("a round's beta is " + std::to_string(beta));
  }
}

void read_clocks(Reader* reader, Request* request) {
  const size_t n = request->header.n_push;
  request->push_clocks = reader->block<int64_t>(n);
  request->push_starts = reader->block<int64_t>(n);  // as updates since the start: clock - start
  for (size_t i = 0; i < n; ++i) {
    const int64_t clock = request->push_clocks[i], updates = request->push_starts[i];
    check_clock(clock);
    if (updates < 0 || clock < updates) throw WireError("a push's clock runs backwards");
    request->push_starts[i] = clock - updates;
  }
}

void read_push(const uint8_t* frame, Request* request) {
  const RequestHeader& header = request->header;
  Reader reader(frame + sizeof(header), header.push_bytes);
  const bool gradients = header.kind == PushKind::kGradients;
  if (gradients) {
    std::memcpy(&request->round, reader.take(sizeof(RoundHeader)), sizeof(RoundHeader));
    check_round(request->round);
  }
  request->push_tables = reader.block<int32_t>(header.n_push);
  request->push_keys = reader.block<int64_t>(header.n_push);
  check_tables(request->push_tables);
  if (!gradients) read_clocks(&reader, request);
  const uint32_t state_dim = gradients ? 0 : header.state_dim;
  const RowCodec codec = codec_of(header.push_codec);
  const auto bytes = static_cast<size_t>(encoded_row_bytes(codec, header.dim, state_dim));
  const uint8_t* rows = reader.take(aligned(bytes * header.n_push));
  reader.expect_end();
  if (codec == RowCodec::kFp32 && reinterpret_cast<uintptr_t>(rows) % alignof(float) == 0) {
    request->deltas = reinterpret_cast<const float*>(rows);
    return;
  }
  const size_t width = size_t{header.dim} + state_dim;
  request->decoded.resize(width * header.n_push);
  for (size_t i = 0; i < header.n_push; ++i) {
    decode_row(codec, rows + i * bytes, header.dim, state_dim, request->decoded.data() + i * width);
  }
  request->deltas = request->decoded.data();
}

constexpr int kQueryBlocks = 6;

void read_query(const uint8_t* frame, Request* request) {
  const RequestHeader& header = request->header;
  Reader reader(frame + sizeof(header) + header.push_bytes, header.query_bytes);
  request->check_tables = reader.block<int32_t>(header.n_check);
  request->check_keys = reader.block<int64_t>(header.n_check);
  request->check_clocks = reader.block<int64_t>(header.n_check);
  request->check_staleness = reader.block<int64_t>(header.n_check);
  request->fetch_tables = reader.block<int32_t>(header.n_fetch);
  request->fetch_keys = reader.block<int64_t>(header.n_fetch);
  reader.expect_end();
  check_tables(request->check_tables);
  check_tables(request->fetch_tables);
  for (const int64_t clock : request->check_clocks) check_clock(clock);
  for (const int64_t staleness : request->check_staleness) {
    if (staleness < 0) throw WireError("a check allows a staleness of " + std::to_string(staleness));
  }
}

}  // namespace

uint32_t checksum(const uint8_t* bytes, size_t size) { return crc32c(bytes, size); }

namespace {

Frame begin_request(RequestHeader* header, const PushView& push, const CheckView& check, const RowNames& fetch) {
  header->magic = kRequestMagic;
  header->version = kProtocolVersion;
  std::fill(std::begin(header->reserved), std::end(header->reserved), 0u);
  header->n_push = static_cast<uint32_t>(push.n);
  header->n_check = static_cast<uint32_t>(check.n);
  header->n_fetch = static_cast<uint32_t>(fetch.n);
  Frame frame(sizeof(*header));
  const int64_t width = int64_t{header->dim} + header->state_dim;
  frame.reserve(sizeof(*header) + 256 + static_cast<size_t>(push.n * width * 4 + push.n * 16) +
                static_cast<size_t>(check.n * 16 + fetch.n * 10));
  return frame;
}

// Adds the queries to a frame that ends with its push part, then header and checksums.
void finish_request(RequestHeader* header, Frame* frame, const CheckView& check, const RowNames& fetch) {
  header->push_bytes = frame->size() - sizeof(*header);
  write_block(frame, check.n, check.tables);
  write_block(frame, check.n, check.keys);
  write_block(frame, check.n, check.clocks);
  write_block(frame, check.n, check.staleness);
  write_block(frame, fetch.n, fetch.tables);
  write_block(frame, fetch.n, fetch.keys);
  header->query_bytes = frame->size() - sizeof(*header) - header->push_bytes;
  header->query_crc = crc32c(frame->data() + sizeof(*header) + header->push_bytes, header->query_bytes);
  std::memcpy(frame->data(), header, sizeof(*header));
  header->push_crc = crc32c(frame->data() + kPushCrcFrom, sizeof(*header) - kPushCrcFrom + header->push_bytes);
  std::memcpy(frame->data(), header, sizeof(*header));
}

}  // namespace

Frame encode_share(RequestHeader header, const RoundHeader& round, const PushView& push, const CheckView& check,
                   const RowNames& fetch) {
  header.kind = PushKind::kGradients;
  Frame frame = begin_request(&header, push, check, fetch);
  frame.resize(sizeof(header) + sizeof(round));
  std::memcpy(frame.data() + sizeof(header), &round, sizeof(round));
  write_block(&frame, push.n, push.tables);
  write_block(&frame, push.n, push.keys);
  write_rows(&frame, codec_of(header.push_codec), header.dim, 0, push.n, push.deltas, nullptr);
  finish_request(&header, &frame, check, fetch);
  return frame;
}

Frame encode_request(RequestHeader header, const PushView& push, const CheckView& check, const RowNames& fetch,
                     const int64_t* places, Residuals* residuals) {
  const int64_t dim = header.dim, state_dim = header.state_dim;
  header.kind = PushKind::kDeltas;
  Frame frame = begin_request(&header, push, check, fetch);
  std::vector<int64_t> updates(static_cast<size_t>(push.n));
  for (int64_t i = 0; i < push.n; ++i) updates[static_cast<size_t>(i)] = push.clocks[i] - push.start_clocks[i];
  write_block(&frame, push.n, push.tables);
  write_block(&frame, push.n, push.keys);
  write_block(&frame, push.n, push.clocks);
  write_block(&frame, push.n, updates.data());
  const RowCodec codec = codec_of(header.push_codec);
  if (residuals == nullptr) {
    write_rows(&frame, codec, dim, state_dim, push.n, push.deltas, places);
  } else {
    const size_t at = frame.size();
    pad(&frame, at + static_cast<size_t>(push.n * encoded_row_bytes(codec, dim, state_dim)));
    residuals->encode(push, places, frame.data() + at);
  }
  finish_request(&header, &frame, check, fetch);
  return frame;
}

Request parse_request(const uint8_t* frame, size_t size, uint64_t max_rows) {
  Request request{};
  RequestHeader& header = request.header;
  if (size < sizeof(header)) throw WireError("a request has at least 96 bytes, got " + std::to_string(size));
  std::memcpy(&header, frame, sizeof(header));
  if (header.magic != kRequestMagic) throw WireError("these bytes are not a request: they do not begin with HETQ");
  check_version(header.version);
  const size_t body = size - sizeof(header);
  if (header.push_bytes > body || header.query_bytes != body - header.push_bytes) {
    throw WireError("a request of " + std::to_string(size) + " bytes announces other sizes of its parts");
  }
  if (header.push_crc != crc32c(frame + kPushCrcFrom, sizeof(header) - kPushCrcFrom + header.push_bytes) ||
      header.query_crc != crc32c(frame + sizeof(header) + header.push_bytes, header.query_bytes)) {
    throw WireError("a request's checksum does not match: it was altered on its way");
  }
  const uint64_t rows = uint64_t{header.n_push} + header.n_check + header.n_fetch;
  if (rows > max_rows) {
    throw WireError("a request is about " + std::to_string(rows) + " rows, the limit is " + std::to_string(max_rows) +
                    "; split it, or raise --max-rows");
  }
  if (header.dim == 0 || header.dim > 1 << 20 || header.state_dim > 1 << 20) {
    throw WireError("a request is about rows of " + std::to_string(header.dim) + " + " +
                    std::to_string(header.state_dim) + " values");
  }
  if (header.kind > PushKind::kGradients) {
    throw WireError("a request pushes an unknown kind " + std::to_string(static_cast<uint32_t>(header.kind)));
  }
  codec_of(header.fetch_codec);
  read_push(frame, &request);
  read_query(frame, &request);
  return request;
}

Frame push_part(const RequestHeader& request, const uint8_t* frame) {
  RequestHeader header = request;
  Frame part(frame, frame + sizeof(header) + header.push_bytes);
  header.n_check = header.n_fetch = 0;
  for (int i = 0; i < kQueryBlocks; ++i) write_block<int64_t>(&part, 0, nullptr);
  header.query_bytes = part.size() - sizeof(header) - header.push_bytes;
  header.query_crc = crc32c(part.data() + sizeof(header) + header.push_bytes, header.query_bytes);
  std::memcpy(part.data(), &header, sizeof(header));
  header.push_crc = crc32c(part.data() + kPushCrcFrom, sizeof(header) - kPushCrcFrom + header.push_bytes);
  std::memcpy(part.data(), &header, sizeof(header));
  return part;
}

void check_tables(const EmbeddingTable& table, const Request& request) {
  table.require_declared(request.header.n_push, request.push_tables.data());
  table.require_declared(request.header.n_check, request.check_tables.data());
  table.require_declared(request.header.n_fetch, request.fetch_tables.data());
}

void apply_push(EmbeddingTable& table, const Request& request, ClockRule rule, const uint8_t* skip) {
  const int32_t* tables = request.push_tables.data();
  const int64_t *keys = request.push_keys.data(), *starts = request.push_starts.data();
  const int64_t* clocks = request.push_clocks.data();
  if (skip == nullptr) {
    table.push({request.header.n_push, tables, keys, starts, clocks, request.deltas}, rule);
    return;
  }
  for (int64_t i = 0; i < request.header.n_push; ++i) {
    if (skip[bucket_of(hash_row(tables[i], keys[i]))]) continue;
    table.push({1, tables + i, keys + i, starts + i, clocks + i, request.deltas + i * table.width()}, rule);
  }
}

void apply_round(EmbeddingTable& table, const std::vector<const Request*>& shares, const uint8_t* skip) {
  std::vector<GradientView> gradients;
  for (const Request* share : shares) {
    gradients.push_back(
        {share->round.rank, share->header.n_push, share->push_tables.data(), share->push_keys.data(), share->deltas});
  }
  const RoundHeader& round = shares.front()->round;
  step_rows(table, gradients, round.lr, round.settings, skip);
}

Frame answer(const EmbeddingTable& table, const Request& query, uint64_t generation) {
  const RequestHeader& request = query.header;
  const RowCodec codec = codec_of(request.fetch_codec);
  const auto bytes = static_cast<size_t>(encoded_row_bytes(codec, request.dim, request.state_dim));
  const size_t n_fetch = request.n_fetch, n_check = request.n_check;

  // Clocks come before rows in the frame, so rows are located first and encoded straight into their place. The lock is
  // held from one to the other: no push may come in between.
  const auto lock = table.read_lock();
  Buffer<const float*> found(std::max(n_fetch, n_check));
  Buffer<int64_t> found_clocks(found.size());
  table.locate(static_cast<int64_t>(n_check), query.check_tables.data(), query.check_keys.data(), found.data(),
               found_clocks.data());
  int64_t lags[kLagBins] = {};
  std::vector<int32_t> stale;
  std::vector<int64_t> stale_clocks;
  Frame stale_rows;
  for (size_t i = 0; i < n_check; ++i) {
    ++lags[lag_bin(found_clocks[i] - query.check_clocks[i])];
    if (found[i] == nullptr || read_is_fresh(found_clocks[i], query.check_clocks[i], query.check_staleness[i]))
      continue;
    stale.push_back(static_cast<int32_t>(i));
    stale_clocks.push_back(found_clocks[i]);
    stale_rows.resize(stale_rows.size() + bytes);
    encode_row(codec, found[i], request.dim, request.state_dim, stale_rows.data() + stale_rows.size() - bytes);
  }
  table.locate(static_cast<int64_t>(n_fetch), query.fetch_tables.data(), query.fetch_keys.data(), found.data(),
               found_clocks.data());
  std::vector<uint8_t> fresh((n_fetch + 63) / 64 * 8, 0);
  size_t n_written = 0;
  for (size_t i = 0; i < n_fetch; ++i) {
    if (found[i] == nullptr) {
      fresh[i / 8] |= static_cast<uint8_t>(1 << (i % 8));
    } else {
      found[n_written] = found[i];
      found_clocks[n_written++] = found_clocks[i];
    }
  }

  ReplyHeader header{};
  header.magic = kReplyMagic;
  header.version = kProtocolVersion;
  header.codec = request.fetch_codec;
  header.dim = request.dim;
  header.state_dim = request.state_dim;
  header.n_fetch = request.n_fetch;
  header.n_written = static_cast<uint32_t>(n_written);
  header.n_stale = static_cast<uint32_t>(stale.size());
  header.generation = generation;
  header.sequence = request.sequence;
  Frame reply(sizeof(header));
  reply.reserve(sizeof(header) + fresh.size() + bytes * n_written + stale_rows.size() + 10 * (n_written + 16) +
                16 * stale.size());
  reply.insert(reply.end(), fresh.begin(), fresh.end());
  write_block(&reply, static_cast<int64_t>(n_written), found_clocks.data());
  const size_t rows_at = reply.size();
  pad(&reply, rows_at + bytes * n_written);
  table.for_each_located(static_cast<int64_t>(n_written), found.data(), [&](int64_t i, const float* row) {
    encode_row(codec, row, request.dim, request.state_dim, reply.data() + rows_at + bytes * static_cast<size_t>(i));
  });
  write_block(&reply, kLagBins, lags);
  write_block(&reply, static_cast<int64_t>(stale.size()), stale.data());
  write_block(&reply, static_cast<int64_t>(stale.size()), stale_clocks.data());
  reply.insert(reply.end(), stale_rows.begin(), stale_rows.end());
  pad(&reply, reply.size());
  std::memcpy(reply.data(), &header, sizeof(header));
  header.crc = crc32c(reply.data() + kReplyCrcFrom, reply.size() - kReplyCrcFrom);
  std::memcpy(reply.data(), &header, sizeof(header));
  return reply;
}

Reply decode_reply(const uint8_t* frame, size_t size) {
  Reply reply;
  ReplyHeader& header = reply.header;
  if (size < sizeof(header)) throw WireError("a reply has at least 48 bytes, got " + std::to_string(size));
  std::memcpy(&header, frame, sizeof(header));
  if (header.magic != kReplyMagic) throw WireError("these bytes are not a reply: they do not begin with HETR");
  check_version(header.version);
  if (header.crc != crc32c(frame + kReplyCrcFrom, size - kReplyCrcFrom)) {
    throw WireError("a reply's checksum does not match: it was altered on its way");
  }
  const RowCodec codec = codec_of(header.codec);
  const size_t width = size_t{header.dim} + header.state_dim;
  const auto bytes = static_cast<size_t>(encoded_row_bytes(codec, header.dim, header.state_dim));
  Reader reader(frame + sizeof(header), size - sizeof(header));
  const uint8_t* fresh_bits = reader.take((size_t{header.n_fetch} + 63) / 64 * 8);
  const Buffer<int64_t> clocks = reader.block<int64_t>(header.n_written);
  const uint8_t* rows = reader.take(aligned(bytes * header.n_written));
  reply.fresh.resize(header.n_fetch);
  reply.clocks.resize(header.n_fetch);
  const bool as_they_are = codec == RowCodec::kFp32 && header.n_written == header.n_fetch &&
                           reinterpret_cast<uintptr_t>(rows) % alignof(float) == 0;
  reply.view = as_they_are ? reinterpret_cast<const float*>(rows) : nullptr;
  if (!as_they_are) reply.rows.resize(width * header.n_fetch);
  size_t next = 0;
  for (size_t i = 0; i < header.n_fetch; ++i) {
    reply.fresh[i] = fresh_bits[i / 8] >> (i % 8) & 1;
    if (reply.fresh[i]) continue;
    if (next == header.n_written) throw WireError("a reply holds fewer rows than it announces");
    reply.clocks[i] = clocks[next];
    if (!as_they_are) {
      decode_row(codec, rows + bytes * next, header.dim, header.state_dim, reply.rows.data() + width * i);
    }
    ++next;
  }
  if (next != header.n_written) throw WireError("a reply holds more rows than were asked for");
  reply.lags = reader.block<int64_t>(kLagBins);
  reply.stale = reader.block<int32_t>(header.n_stale);
  reply.stale_clocks = reader.block<int64_t>(header.n_stale);
  const uint8_t* stale_rows = reader.take(aligned(bytes * header.n_stale));
  reader.expect_end();
  reply.stale_rows.resize(width * header.n_stale);
  for (size_t i = 0; i < header.n_stale; ++i) {
    decode_row(codec, stale_rows + bytes * i, header.dim, header.state_dim, reply.stale_rows.data() + width * i);
  }
  return reply;
}

}  // namespace hetrec
