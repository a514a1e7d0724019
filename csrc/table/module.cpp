// Python binding of EmbeddingTable. Arrays are numpy's, used in place; the GIL is released while rows move.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "table/embedding_table.h"

namespace nb = nanobind;
using hetrec::EmbeddingTable;

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

void push(EmbeddingTable& self, Vec<const int32_t> tables, Vec<const int64_t> keys, Vec<const int64_t> start_clocks,
          Vec<const int64_t> clocks, Mat<const float> deltas, const std::string& rule) {
  if (rule != "lamport" && rule != "sum")
    throw std::invalid_argument("unknown clock rule '" + rule + "'; lamport or sum");
  const size_t n = keys.shape(0);
  const hetrec::PushView view{static_cast<int64_t>(n),
                              checked(tables, "tables", n),
                              keys.data(),
                              checked(start_clocks, "start_clocks", n),
                              checked(clocks, "clocks", n),
                              checked(deltas, "deltas", n, self.width())};
  const nb::gil_scoped_release release;
  self.push(view, rule == "sum" ? hetrec::ClockRule::kSum : hetrec::ClockRule::kLamport);
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

nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> stale(const EmbeddingTable& self, Vec<const int32_t> tables,
                                                   Vec<const int64_t> keys, Vec<const int64_t> clocks,
                                                   int64_t staleness) {
  const size_t n = keys.shape(0);
  const int32_t* table_ids = checked(tables, "tables", n);
  const int64_t* clock_values = checked(clocks, "clocks", n);
  auto* found = new std::vector<int32_t>();
  const nb::capsule owner(found, [](void* p) noexcept { delete static_cast<std::vector<int32_t>*>(p); });
  {
    const nb::gil_scoped_release release;
    *found = self.stale(static_cast<int64_t>(n), table_ids, keys.data(), clock_values, staleness);
  }
  return {found->data(), {found->size()}, owner};
}

void export_bucket(const EmbeddingTable& self, int64_t bucket, Vec<int32_t> tables, Vec<int64_t> keys,
                   Vec<int64_t> clocks, Mat<float> rows) {
  const size_t n = static_cast<size_t>(self.bucket_size(bucket));
  self.export_bucket(bucket, checked(tables, "tables", n), checked(keys, "keys", n), checked(clocks, "clocks", n),
                     checked(rows, "rows", n, self.width()));
}

void assign(EmbeddingTable& self, Vec<const int32_t> tables, Vec<const int64_t> keys, Vec<const int64_t> clocks,
            Mat<const float> rows) {
  const size_t n = keys.shape(0);
  self.assign(static_cast<int64_t>(n), checked(tables, "tables", n), keys.data(), checked(clocks, "clocks", n),
              checked(rows, "rows", n, self.width()));
}

}  // namespace

NB_MODULE(_table, m) {
  m.attr("BUCKETS") = hetrec::kBuckets;
  nb::class_<EmbeddingTable>(m, "EmbeddingTable",
                             "Rows of one width by (table id, key): `dim` float32 weights, then `state_dim` values of "
                             "optimizer state, and a clock. Rows nobody pushed do not exist.")
      .def(nb::init<int64_t, int64_t>(), nb::arg("dim"), nb::arg("state_dim"))
      .def(
          "set_init",
          [](EmbeddingTable& self, int32_t table, uint64_t seed, float low, float high, float state) {
            self.set_init(table, {seed, low, high, state});
          },
          nb::arg("table"), nb::arg("seed"), nb::arg("low"), nb::arg("high"), nb::arg("state"),
          "Declare table `table`: weights begin uniform in [low, high), state at `state`.")
      .def("push", &push, nb::arg("tables"), nb::arg("keys"), nb::arg("start_clocks"), nb::arg("clocks"),
           nb::arg("deltas"), nb::arg("rule") = "lamport",
           "Add `deltas` (n, dim + state_dim) float32 to the rows and merge their clocks.")
      .def("fetch", &fetch, nb::arg("tables"), nb::arg("keys"), nb::arg("rows"), nb::arg("clocks"), nb::arg("fresh"),
           "Copy rows and clocks into the given arrays; fresh[i] = 1 where nobody wrote row i (left untouched).")
      .def("stale", &stale, nb::arg("tables"), nb::arg("keys"), nb::arg("clocks"), nb::arg("staleness"),
           "Indices (int32, ascending) of rows whose global clock exceeds clocks[i] + staleness.")
      .def("bucket_size", &EmbeddingTable::bucket_size, nb::arg("bucket"), "Rows in one of the 4096 buckets.")
      .def("export_bucket", &export_bucket, nb::arg("bucket"), nb::arg("tables"), nb::arg("keys"), nb::arg("clocks"),
           nb::arg("rows"), "Copy one bucket's rows into arrays of length bucket_size(bucket).")
      .def("assign", &assign, nb::arg("tables"), nb::arg("keys"), nb::arg("clocks"), nb::arg("rows"),
           "Set rows to exact values, creating them where needed.")
      .def("clear", &EmbeddingTable::clear, "Forget every row.")
      .def_prop_ro("dim", &EmbeddingTable::dim)
      .def_prop_ro("state_dim", &EmbeddingTable::state_dim)
      .def_prop_ro("memory_bytes", &EmbeddingTable::memory_bytes, "Bytes held by rows and indices.")
      .def("__len__", &EmbeddingTable::size);
}
