// Python binding of EmbeddingTable. Arrays are numpy's, used in place; the GIL is released while rows move.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "table/embedding_table.h"
#include "table/residuals.h"
#include "table/wire.h"

namespace nb = nanobind;
using hetrec::EmbeddingTable;
using hetrec::Request;
using hetrec::RequestHeader;
using hetrec::RoundHeader;

namespace {

template <typename T>
using Vec = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Mat = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void expect(bool ok, const char* what, size_t got, size_t wanted) {
  if (ok) return;
  throw std::invalid_argument(std::string(what) + " has length " + std::to_string(got) + ", expected " +
                              std::to_string(wanted));
}

template <typename T>
T* checked(const Vec<T>& v, const char* name, size_t n) {
  expect(v.shape(0) == n, name, v.shape(0), n);
  return v.data();
}

template <typename T>
T* checked(const Mat<T>& m, const char* name, size_t n, int64_t width) {
  expect(m.shape(0) == n, name, m.shape(0), n);
  expect(m.shape(1) == static_cast<size_t>(width), "a row", m.shape(1), static_cast<size_t>(width));
  return m.data();
}

hetrec::ClockRule rule_of(const std::string& rule) {
  if (rule == "lamport") return hetrec::ClockRule::kLamport;
  if (rule == "sum") return hetrec::ClockRule::kSum;
  throw std::invalid_argument("unknown clock rule '" + rule + "'; lamport or sum");
}

hetrec::Optimizer optimizer_of(int32_t number) {
  if (number >= 0 && number < hetrec::kOptimizers) return static_cast<hetrec::Optimizer>(number);
  throw std::invalid_argument("unknown optimizer number " + std::to_string(number));
}

// A learning rate and the optimizer's settings, as one array.
void set_step(float* lr, hetrec::OptimizerSettings* settings, const Vec<const float>& step) {
  const float* values = checked(step, "step", 1 + hetrec::kOptimizerSettings);
  *lr = values[0];
  std::memcpy(settings, values + 1, sizeof(*settings));
}

using Gradients = std::tuple<Vec<const int32_t>, Vec<const int64_t>, Mat<const float>>;

void step(EmbeddingTable& self, const std::vector<Gradients>& shares, Vec<const float> how) {
  float lr = 0.f;
  hetrec::OptimizerSettings settings;
  set_step(&lr, &settings, how);
  std::vector<hetrec::GradientView> views;
  for (const auto& [tables, keys, gradients] : shares) {
    const size_t n = keys.shape(0);
    views.push_back({static_cast<int64_t>(views.size()), static_cast<int64_t>(n), checked(tables, "tables", n),
                     keys.data(), checked(gradients, "gradients", n, self.dim())});
  }
  const nb::gil_scoped_release release;
  hetrec::step_rows(self, views, lr, settings);
}

void push(EmbeddingTable& self, Vec<const int32_t> tables, Vec<const int64_t> keys, Vec<const int64_t> start_clocks,
          Vec<const int64_t> clocks, Mat<const float> deltas, const std::string& rule) {
  const hetrec::ClockRule clock_rule = rule_of(rule);
  const size_t n = keys.shape(0);
  const hetrec::PushView view{static_cast<int64_t>(n),
                              checked(tables, "tables", n),
                              keys.data(),
                              checked(start_clocks, "start_clocks", n),
                              checked(clocks, "clocks", n),
                              checked(deltas, "deltas", n, self.width())};
  const nb::gil_scoped_release release;
  self.push(view, clock_rule);
}

void fetch(const EmbeddingTable& self, Vec<const int32_t> tables, Vec<const int64_t> keys, Mat<float> rows,
           Vec<int64_t> clocks, Vec<uint8_t> fresh) {
  const size_t n = keys.shape(0);
  const hetrec::FetchView view{
      static_cast<int64_t>(n),      checked(tables, "tables", n), keys.data(), checked(rows, "rows", n, self.width()),
      checked(clocks, "clocks", n), checked(fresh, "fresh", n)};
  const nb::gil_scoped_release release;
  self.fetch(view);
}

void export_bucket(const EmbeddingTable& self, int64_t bucket, Vec<int32_t> tables, Vec<int64_t> keys,
                   Vec<int64_t> clocks, Mat<float> rows) {
  const size_t n = static_cast<size_t>(self.bucket_size(bucket));
  int32_t* table_ids = checked(tables, "tables", n);
  int64_t *key_values = checked(keys, "keys", n), *clock_values = checked(clocks, "clocks", n);
  float* values = checked(rows, "rows", n, self.width());
  const nb::gil_scoped_release release;
  self.export_bucket(bucket, table_ids, key_values, clock_values, values);
}

const uint8_t* bucket_flags(const std::optional<Vec<const uint8_t>>& skip) {
  return skip ? checked(*skip, "skip", hetrec::kBuckets) : nullptr;
}

void assign(EmbeddingTable& self, Vec<const int32_t> tables, Vec<const int64_t> keys, Vec<const int64_t> clocks,
            Mat<const float> rows, std::optional<Vec<const uint8_t>> skip) {
  const size_t n = keys.shape(0);
  const int32_t* table_ids = checked(tables, "tables", n);
  const int64_t* clock_values = checked(clocks, "clocks", n);
  const float* values = checked(rows, "rows", n, self.width());
  const uint8_t* flags = bucket_flags(skip);
  const nb::gil_scoped_release release;
  self.assign(static_cast<int64_t>(n), table_ids, keys.data(), clock_values, values, flags);
}

int64_t erase(EmbeddingTable& self, Vec<const int32_t> tables, std::optional<Vec<const uint8_t>> skip) {
  const uint8_t* flags = bucket_flags(skip);
  const nb::gil_scoped_release release;
  return self.erase(static_cast<int64_t>(tables.shape(0)), tables.data(), flags);
}

// A C++ vector as a numpy array that owns it.
template <typename T, typename Allocator>
nb::ndarray<nb::numpy, T> owned(std::vector<T, Allocator>&& values, std::initializer_list<size_t> shape) {
  using Kept = std::vector<T, Allocator>;
  auto* kept = new Kept(std::move(values));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Kept*>(p); });
  return {kept->data(), shape, owner};
}

template <typename T, typename Allocator>
nb::ndarray<nb::numpy, T> owned(std::vector<T, Allocator>&& values) {
  const size_t n = values.size();
  return owned(std::move(values), {n});
}

nb::tuple rows_of(const EmbeddingTable& self, Vec<const int32_t> tables, int64_t first, int64_t last) {
  hetrec::RowCopies copies;
  {
    const nb::gil_scoped_release release;
    copies = self.rows_of(static_cast<int64_t>(tables.shape(0)), tables.data(), first, last);
  }
  const size_t n = copies.keys.size();
  return nb::make_tuple(owned(std::move(copies.tables)), owned(std::move(copies.keys)), owned(std::move(copies.clocks)),
                        owned(std::move(copies.rows), {n, static_cast<size_t>(self.width())}));
}

nb::tuple stale(const EmbeddingTable& self, Vec<const int32_t> tables, Vec<const int64_t> keys,
                Vec<const int64_t> clocks, Vec<const int64_t> staleness) {
  const size_t n = keys.shape(0);
  const int32_t* table_ids = checked(tables, "tables", n);
  const int64_t* clock_values = checked(clocks, "clocks", n);
  const int64_t* allowed = checked(staleness, "staleness", n);
  std::vector<int64_t> lags(hetrec::kLagBins);
  std::vector<int32_t> found;
  {
    const nb::gil_scoped_release release;
    found = self.stale(static_cast<int64_t>(n), table_ids, keys.data(), clock_values, allowed, lags.data());
  }
  return nb::make_tuple(owned(std::move(found)), owned(std::move(lags)));
}

using Bytes = Vec<const uint8_t>;

RequestHeader header_of(uint64_t worker, uint64_t session, uint64_t sequence, uint64_t generation, uint32_t dim,
                        uint32_t state_dim, uint8_t push_codec, uint8_t fetch_codec) {
  RequestHeader header{};
  header.worker = worker;
  header.session = session;
  header.sequence = sequence;
  header.generation = generation;
  header.dim = dim;
  header.state_dim = state_dim;
  header.push_codec = push_codec;
  header.fetch_codec = fetch_codec;
  return header;
}

hetrec::CheckView check_view(const Vec<const int32_t>& tables, const Vec<const int64_t>& keys,
                             const Vec<const int64_t>& clocks, const Vec<const int64_t>& staleness) {
  const size_t n = keys.shape(0);
  return {static_cast<int64_t>(n), checked(tables, "check_tables", n), keys.data(), checked(clocks, "check_clocks", n),
          checked(staleness, "check_staleness", n)};
}

hetrec::RowNames row_names(const Vec<const int32_t>& tables, const Vec<const int64_t>& keys) {
  return {static_cast<int64_t>(keys.shape(0)), checked(tables, "fetch_tables", keys.shape(0)), keys.data()};
}

nb::object encode_request(uint64_t worker, uint64_t session, uint64_t sequence, uint64_t generation, uint32_t dim,
                          uint32_t state_dim, uint8_t push_codec, uint8_t fetch_codec, Vec<const int32_t> push_tables,
                          Vec<const int64_t> push_keys, Vec<const int64_t> push_starts, Vec<const int64_t> push_clocks,
                          Mat<const float> deltas, Vec<const int32_t> check_tables, Vec<const int64_t> check_keys,
                          Vec<const int64_t> check_clocks, Vec<const int64_t> check_staleness,
                          Vec<const int32_t> fetch_tables, Vec<const int64_t> fetch_keys,
                          std::optional<Vec<const int64_t>> places, hetrec::Residuals* residuals) {
  const RequestHeader header =
      header_of(worker, session, sequence, generation, dim, state_dim, push_codec, fetch_codec);
  const size_t n_push = push_keys.shape(0);
  const hetrec::PushView push{static_cast<int64_t>(n_push),
                              checked(push_tables, "push_tables", n_push),
                              push_keys.data(),
                              checked(push_starts, "push_starts", n_push),
                              checked(push_clocks, "push_clocks", n_push),
                              checked(deltas, "deltas", places ? deltas.shape(0) : n_push, int64_t{dim} + state_dim)};
  const int64_t* delta_places = places ? checked(*places, "places", n_push) : nullptr;
  for (size_t i = 0; places && i < n_push; ++i) {
    if (delta_places[i] < 0 || static_cast<size_t>(delta_places[i]) >= deltas.shape(0)) {
      throw std::invalid_argument("a delta's place is " + std::to_string(delta_places[i]) + ", there are " +
                                  std::to_string(deltas.shape(0)));
    }
  }
  const hetrec::CheckView check = check_view(check_tables, check_keys, check_clocks, check_staleness);
  const hetrec::RowNames fetch = row_names(fetch_tables, fetch_keys);
  if (residuals != nullptr && (static_cast<uint8_t>(residuals->codec()) != push_codec || residuals->dim() != dim ||
                               residuals->state_dim() != state_dim)) {
    throw std::invalid_argument("these residuals are of another codec or row format than the request");
  }
  hetrec::Frame frame;
  {
    const nb::gil_scoped_release release;
    frame = hetrec::encode_request(header, push, check, fetch, delta_places, residuals);
  }
  return nb::cast(owned(std::move(frame)));
}

nb::object encode_share(uint64_t worker, uint64_t session, uint64_t sequence, uint64_t generation, uint32_t dim,
                        uint32_t state_dim, uint8_t push_codec, uint8_t fetch_codec, uint64_t group, uint64_t number,
                        uint32_t rank, uint32_t ranks, bool more, uint32_t wait_ms, Vec<const float> step,
                        Vec<const int32_t> push_tables, Vec<const int64_t> push_keys, Mat<const float> gradients,
                        Vec<const int32_t> check_tables, Vec<const int64_t> check_keys, Vec<const int64_t> check_clocks,
                        Vec<const int64_t> check_staleness, Vec<const int32_t> fetch_tables,
                        Vec<const int64_t> fetch_keys) {
  const RequestHeader header =
      header_of(worker, session, sequence, generation, dim, state_dim, push_codec, fetch_codec);
  RoundHeader round{group, number, rank, ranks, more, wait_ms, 0.f, {}, 0};
  set_step(&round.lr, &round.settings, step);
  const size_t n_push = push_keys.shape(0);
  const hetrec::PushView push{static_cast<int64_t>(n_push),
                              checked(push_tables, "push_tables", n_push),
                              push_keys.data(),
                              nullptr,
                              nullptr,
                              checked(gradients, "gradients", n_push, dim)};
  const hetrec::CheckView check = check_view(check_tables, check_keys, check_clocks, check_staleness);
  const hetrec::RowNames fetch = row_names(fetch_tables, fetch_keys);
  hetrec::Frame frame;
  {
    const nb::gil_scoped_release release;
    frame = hetrec::encode_share(header, round, push, check, fetch);
  }
  return nb::cast(owned(std::move(frame)));
}

Request parse_request(Bytes frame, uint64_t max_rows) {
  const nb::gil_scoped_release release;
  return hetrec::parse_request(frame.data(), frame.shape(0), max_rows);
}

nb::tuple drain(hetrec::Residuals& residuals) {
  hetrec::Residuals::Kept kept;
  {
    const nb::gil_scoped_release release;
    kept = residuals.drain();
  }
  const size_t n = kept.keys.size();
  const auto width = static_cast<size_t>(residuals.dim() + residuals.state_dim());
  return nb::make_tuple(owned(std::move(kept.tables)), owned(std::move(kept.keys)),
                        owned(std::move(kept.rows), {n, width}));
}

nb::object decode_reply(nb::object frame_object) {
  const auto frame = nb::cast<Bytes>(frame_object);
  hetrec::Reply reply;
  {
    const nb::gil_scoped_release release;
    reply = hetrec::decode_reply(frame.data(), frame.shape(0));
  }
  const size_t width = size_t{reply.header.dim} + reply.header.state_dim;
  const size_t n = reply.header.n_fetch, stale = reply.header.n_stale;
  const uint64_t generation = reply.header.generation, sequence = reply.header.sequence;
  using Rows = nb::ndarray<nb::numpy, float>;
  // A view keeps the frame alive. Nobody writes to it; numpy must not know, or torch would warn of every one.
  Rows rows = reply.view == nullptr ? owned(std::move(reply.rows), {n, width})
                                    : Rows(const_cast<float*>(reply.view), {n, width}, frame_object);
  return nb::make_tuple(generation, sequence, rows, owned(std::move(reply.clocks)), owned(std::move(reply.fresh)),
                        owned(std::move(reply.lags)), owned(std::move(reply.stale)),
                        owned(std::move(reply.stale_rows), {stale, width}), owned(std::move(reply.stale_clocks)));
}

void expect_format(const EmbeddingTable& table, const Request& request) {
  if (table.dim() == request.header.dim && table.state_dim() == request.header.state_dim) return;
  throw std::invalid_argument("a request about rows of another format than the table's");
}

void expect_kind(const Request& request, hetrec::PushKind kind) {
  if (request.header.kind != kind) throw std::invalid_argument("a request that pushes something else");
}

void define_wire(nb::module_& m) {
  nb::exception<hetrec::WireError>(m, "WireError", PyExc_ValueError);
  m.attr("PROTOCOL_VERSION") = hetrec::kProtocolVersion;
  m.def(
      "encode_request", &encode_request, nb::kw_only(), nb::arg("worker"), nb::arg("session"), nb::arg("sequence"),
      nb::arg("generation"), nb::arg("dim"), nb::arg("state_dim"), nb::arg("push_codec"), nb::arg("fetch_codec"),
      nb::arg("push_tables"), nb::arg("push_keys"), nb::arg("push_starts"), nb::arg("push_clocks"), nb::arg("deltas"),
      nb::arg("check_tables"), nb::arg("check_keys"), nb::arg("check_clocks"), nb::arg("check_staleness"),
      nb::arg("fetch_tables"), nb::arg("fetch_keys"), nb::arg("places") = nb::none(), nb::arg("residuals") = nb::none(),
      "A request frame, uint8. With places, int64, push i's delta is deltas[places[i]]. With residuals, what the codec "
      "rounds off is kept there, and sent what was kept.");
  m.def("encode_share", &encode_share, nb::kw_only(), nb::arg("worker"), nb::arg("session"), nb::arg("sequence"),
        nb::arg("generation"), nb::arg("dim"), nb::arg("state_dim"), nb::arg("push_codec"), nb::arg("fetch_codec"),
        nb::arg("group"), nb::arg("number"), nb::arg("rank"), nb::arg("ranks"), nb::arg("more"), nb::arg("wait_ms"),
        nb::arg("step"), nb::arg("push_tables"), nb::arg("push_keys"), nb::arg("gradients"), nb::arg("check_tables"),
        nb::arg("check_keys"), nb::arg("check_clocks"), nb::arg("check_staleness"), nb::arg("fetch_tables"),
        nb::arg("fetch_keys"), "A request frame with a rank's gradients for a round, uint8.");
  nb::class_<RoundHeader>(m, "Round", "Whose share of which round a request carries.")
      .def_ro("group", &RoundHeader::group)
      .def_ro("number", &RoundHeader::number)
      .def_ro("rank", &RoundHeader::rank)
      .def_ro("ranks", &RoundHeader::ranks)
      .def_ro("more", &RoundHeader::more, "1: the next frame of the stream goes on with this share.")
      .def_ro("wait_ms", &RoundHeader::wait_ms)
      .def_prop_ro(
          "step",
          [](const RoundHeader& self) {
            std::vector<float> step(1 + hetrec::kOptimizerSettings, self.lr);
            std::memcpy(step.data() + 1, &self.settings, sizeof(self.settings));
            return owned(std::move(step));
          },
          nb::rv_policy::automatic, "The learning rate and the optimizer's settings, float32 (7,).");
  nb::class_<Request> request(m, "Request", "A request that was checked as a whole, decoded.");
  for (const auto& [name, field] : {std::pair{"worker", &RequestHeader::worker},
                                    {"session", &RequestHeader::session},
                                    {"sequence", &RequestHeader::sequence},
                                    {"generation", &RequestHeader::generation}}) {
    request.def_prop_ro(name, [field = field](const Request& self) { return self.header.*field; });
  }
  for (const auto& [name, field] : {std::pair{"dim", &RequestHeader::dim},
                                    {"state_dim", &RequestHeader::state_dim},
                                    {"pushes", &RequestHeader::n_push},
                                    {"checks", &RequestHeader::n_check},
                                    {"fetches", &RequestHeader::n_fetch}}) {
    request.def_prop_ro(name, [field = field](const Request& self) { return self.header.*field; });
  }
  request.def_prop_ro("fetch_codec", [](const Request& self) { return self.header.fetch_codec; });
  request.def_prop_ro("round", [](const Request& self) -> std::optional<RoundHeader> {
    if (self.header.kind != hetrec::PushKind::kGradients) return std::nullopt;
    return self.round;
  });
  m.def("parse_request", &parse_request, nb::arg("frame"), nb::arg("max_rows"), nb::keep_alive<0, 1>(),
        "Check a request frame as a whole and decode it. Raises WireError.");
  m.def(
      "push_part",
      [](const Request& request, Bytes frame) {
        hetrec::Frame part;
        {
          const nb::gil_scoped_release release;
          part = hetrec::push_part(request.header, frame.data());
        }
        return nb::cast(owned(std::move(part)));
      },
      nb::arg("request"), nb::arg("frame"),
      "The part of a request's frame that changes rows, as a request of its own.");
  m.def(
      "apply_push",
      [](EmbeddingTable& table, const Request& request, const std::string& rule, std::optional<Bytes> skip) {
        const hetrec::ClockRule clock_rule = rule_of(rule);
        const uint8_t* flags = bucket_flags(skip);
        expect_format(table, request);
        expect_kind(request, hetrec::PushKind::kDeltas);
        const nb::gil_scoped_release release;
        hetrec::apply_push(table, request, clock_rule, flags);
      },
      nb::arg("table"), nb::arg("request"), nb::arg("rule"), nb::arg("skip") = nb::none(),
      "Apply a request's pushes; with skip, uint8 (BUCKETS,), only to buckets whose flag is 0.");
  m.def(
      "apply_round",
      [](EmbeddingTable& table, const std::vector<const Request*>& shares, std::optional<Bytes> skip) {
        const uint8_t* flags = skip ? checked(*skip, "skip", hetrec::kBuckets) : nullptr;
        if (shares.empty()) throw std::invalid_argument("a round has at least one share");
        for (const Request* share : shares) {
          expect_format(table, *share);
          expect_kind(*share, hetrec::PushKind::kGradients);
        }
        const nb::gil_scoped_release release;
        hetrec::apply_round(table, shares, flags);
      },
      nb::arg("table"), nb::arg("shares"), nb::arg("skip") = nb::none(),
      "Sum the gradients of each row over the shares, in their order, and step it once; skip as for apply_push.");
  m.def("check_tables", &hetrec::check_tables, nb::arg("table"), nb::arg("request"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Raise IndexError when a request names a table that was not declared.");
  m.def(
      "answer",
      [](const EmbeddingTable& table, const Request& request, uint64_t generation) {
        expect_format(table, request);
        hetrec::Frame reply;
        {
          const nb::gil_scoped_release release;
          reply = hetrec::answer(table, request, generation);
        }
        return nb::cast(owned(std::move(reply)));
      },
      nb::arg("table"), nb::arg("request"), nb::arg("generation"), "The reply frame to a request, uint8.");
  nb::class_<hetrec::Residuals>(m, "Residuals",
                                "Rounding errors of lossy pushes by row, for rows of one format and one codec.")
      .def(
          "__init__",
          [](hetrec::Residuals* self, uint8_t codec, int64_t dim, int64_t state_dim) {
            if (codec >= hetrec::kRowCodecs) throw std::invalid_argument("unknown row codec");
            new (self) hetrec::Residuals(static_cast<hetrec::RowCodec>(codec), dim, state_dim);
          },
          nb::arg("codec"), nb::arg("dim"), nb::arg("state_dim"))
      .def("drain", &drain, "(tables, keys, errors) of the rows whose error is not zero; they are forgotten.")
      .def("clear", &hetrec::Residuals::clear, "Forget every error.")
      .def("__len__", &hetrec::Residuals::size);
  m.def("decode_reply", &decode_reply, nb::arg("frame"),
        "(generation, sequence, rows, clocks, fresh, lags, stale, stale_rows, stale_clocks) of a reply. Raises "
        "WireError.");
  m.def(
      "encoded_row_bytes",
      [](uint8_t codec, int64_t dim, int64_t state_dim) {
        if (codec >= hetrec::kRowCodecs) throw std::invalid_argument("unknown row codec");
        return hetrec::encoded_row_bytes(static_cast<hetrec::RowCodec>(codec), dim, state_dim);
      },
      nb::arg("codec"), nb::arg("dim"), nb::arg("state_dim"), "Bytes of one row as it travels.");
  m.def(
      "keep_freed_memory",
      [] {
#if defined(__GLIBC__)
        mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most there is
        mallopt(M_TRIM_THRESHOLD, 256 << 20);
#endif
      },
      "Let this process keep up to 256 MiB that it freed: a server fills and frees buffers of the same sizes all day, "
      "and fresh pages cost more than what is written to them.");
  m.def(
      "checksum", [](Bytes bytes) { return hetrec::checksum(bytes.data(), bytes.shape(0)); }, nb::arg("bytes"),
      "The CRC-32C that frames carry.");
  m.def(
      "shards",
      [](Vec<const int32_t> tables, Vec<const int64_t> keys, uint32_t n) {
        const size_t rows = keys.shape(0);
        const int32_t* table = checked(tables, "tables", rows);
        std::vector<uint16_t> shard(rows);
        if (n < 1 || n > hetrec::kBuckets) throw std::invalid_argument("1 to 4096 shards, got " + std::to_string(n));
        for (size_t i = 0; i < rows; ++i) {
          const uint64_t bucket = hetrec::bucket_of(hetrec::hash_row(table[i], keys.data()[i]));
          shard[i] = static_cast<uint16_t>(bucket * n / hetrec::kBuckets);
        }
        return nb::cast(owned(std::move(shard)));
      },
      nb::arg("tables"), nb::arg("keys"), nb::arg("n"), "The shard of each row: its bucket's share of 0..n-1, uint16.");
}

}  // namespace

NB_MODULE(_table, m) {
  m.attr("BUCKETS") = hetrec::kBuckets;
  m.attr("LAG_BINS") = hetrec::kLagBins;
  define_wire(m);
  nb::class_<EmbeddingTable>(m, "EmbeddingTable",
                             "Rows of one width by (table id, key): `dim` float32 weights, then `state_dim` values of "
                             "optimizer state, and a clock. Rows nobody pushed do not exist.")
      .def(nb::init<int64_t, int64_t>(), nb::arg("dim"), nb::arg("state_dim"))
      .def(
          "declare",
          [](EmbeddingTable& self, int32_t table, uint64_t seed, float low, float high, float state,
             int32_t optimizer) { self.declare(table, {seed, low, high, state}, optimizer_of(optimizer)); },
          nb::arg("table"), nb::arg("seed"), nb::arg("low"), nb::arg("high"), nb::arg("state"), nb::arg("optimizer"),
          "Declare table `table`: weights begin uniform in [low, high), state at `state`; the optimizer's number says "
          "what trains them.")
      .def("push", &push, nb::arg("tables"), nb::arg("keys"), nb::arg("start_clocks"), nb::arg("clocks"),
           nb::arg("deltas"), nb::arg("rule") = "lamport",
           "Add `deltas` (n, dim + state_dim) float32 to the rows and merge their clocks.")
      .def("step", &step, nb::arg("shares"), nb::arg("step"),
           "shares: (tables, keys, gradients (n, dim) float32) of each rank. Sum the gradients of each row and step it "
           "once; step: learning rate and the optimizer's settings, float32 (7,). A row's clock advances by the number "
           "of ranks that had a gradient for it.")
      .def("fetch", &fetch, nb::arg("tables"), nb::arg("keys"), nb::arg("rows"), nb::arg("clocks"), nb::arg("fresh"),
           "Copy rows and clocks into the given arrays; fresh[i] = 1 where nobody wrote row i (left untouched).")
      .def("stale", &stale, nb::arg("tables"), nb::arg("keys"), nb::arg("clocks"), nb::arg("staleness"),
           "Indices (int32, ascending) of rows whose global clock exceeds clocks[i] + staleness[i], and how often it "
           "exceeds clocks[i] by how much, int64 (LAG_BINS,).")
      .def("bucket_size", &EmbeddingTable::bucket_size, nb::arg("bucket"), "Rows in one of the 4096 buckets.")
      .def("export_bucket", &export_bucket, nb::arg("bucket"), nb::arg("tables"), nb::arg("keys"), nb::arg("clocks"),
           nb::arg("rows"), "Copy one bucket's rows into arrays of length bucket_size(bucket).")
      .def("rows_of", &rows_of, nb::arg("tables"), nb::arg("first"), nb::arg("last"),
           "(tables, keys, clocks, rows) of the written rows of these tables in buckets first .. last - 1.")
      .def("assign", &assign, nb::arg("tables"), nb::arg("keys"), nb::arg("clocks"), nb::arg("rows"),
           nb::arg("skip") = nb::none(),
           "Set rows to exact values, creating them where needed; with skip, uint8 (BUCKETS,), only in buckets whose "
           "flag is 0.")
      .def("erase", &erase, nb::arg("tables"), nb::arg("skip") = nb::none(),
           "Forget every row of these tables; with skip as assign. Returns how many there were.")
      .def("clear", &EmbeddingTable::clear, "Forget every row.")
      .def_prop_ro("dim", &EmbeddingTable::dim)
      .def_prop_ro("state_dim", &EmbeddingTable::state_dim)
      .def_prop_ro("left_out", &EmbeddingTable::left_out,
                   "Rows whose push or step was left out: they would have become NaN or infinite.")
      .def_prop_ro("memory_bytes", &EmbeddingTable::memory_bytes, "Bytes held by rows and indices.")
      .def("__len__", &EmbeddingTable::size);
}
