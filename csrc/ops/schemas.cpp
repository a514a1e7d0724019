// Every op of the library, in one place. Mutations are declared here; kernels (cpu/, cuda/) only implement them.
//
// Shapes: N positions (keys of a batch, duplicates included), U unique rows, F features, B samples, D weights a row,
// R = D + optimizer state, S = slots of the cache (a multiple of 32), S' = S + spill rows.
//   tags uint8 (S), priority int64 (S), meta int64 (S', 4) (see core/cache_set.h), rows float32 (S', 2, R): values,
//   deltas. sketch uint8 (S / 32, 256) for tiny_lfu and lookahead (core/frequency_sketch.h), window int64 (buckets, 8,
//   2) for lookahead (core/window.h), else empty.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(hetrec, m) {
  // Position of the first key outside its table (feature_rows[f] rows, 0: no limit), or -1.
  m.def("check_keys(Tensor keys, Tensor feature_splits, Tensor feature_rows) -> Tensor");
  // Unique (table, key) rows in order of first occurrence; inverse (N): position -> row; order (N) and splits (U + 1):
  // the positions of each row.
  m.def(
      "unique_rows(Tensor keys, Tensor feature_splits, Tensor feature_tables) -> "
      "(Tensor keys, Tensor tables, Tensor inverse, Tensor order, Tensor splits)");
  // Finds or makes room for every row, pins it, and cuts what must be pushed. slots (U), -1 where the spill rows are
  // too few. fetch: rows (indices into U) to fetch, counts[0] inserted ones first, then refreshed ones. late: rows that
  // become invalid by updates still to come. checks: hits whose clock the server should look at (check_clocks).
  // tick: the batch's number; uses: rows of all batches before. staleness int64 (T): the bound s, by table id.
  // counts: inserted, evicted, refused a slot, without a slot because all were pinned, without a spill row.
  m.def(
      "cache_plan(Tensor(a!) tags, Tensor(b!) priority, Tensor(c!) meta, Tensor(d!) rows, Tensor(e!) sketch, "
      "Tensor(f!) window, Tensor keys, Tensor tables, int policy, int tick, int uses, Tensor staleness, "
      "bool want_checks) -> "
      "(Tensor slots, Tensor fetch, Tensor late, Tensor checks, Tensor check_clocks, Tensor push_keys, "
      "Tensor push_tables, Tensor push_starts, Tensor push_clocks, Tensor push_deltas, Tensor counts)");
  // lookahead: batch `tick`, at most 64 after the one planned last, uses these rows. Returns how many found no room.
  m.def(
      "cache_reveal(Tensor tags, Tensor(a!) priority, Tensor meta, Tensor(b!) window, Tensor keys, Tensor tables, "
      "int tick) -> Tensor");
  // lookahead: the batches that were revealed do not come.
  m.def("cache_unreveal(Tensor(a!) priority, Tensor(b!) window) -> ()");
  // Gives rows without a slot (-1) free spill rows, pinned; returns how many found none.
  m.def("cache_spill(Tensor(a!) meta, Tensor(b!) slots, Tensor keys, Tensor tables, int capacity) -> Tensor");
  // Cuts the pending deltas of slots: what a push carries is no longer pending. selected: indices into slots.
  m.def(
      "cache_cut(Tensor(a!) meta, Tensor(b!) rows, Tensor slots) -> "
      "(Tensor selected, Tensor push_keys, Tensor push_tables, Tensor push_starts, Tensor push_clocks, "
      "Tensor push_deltas)");
  // Says that the answers due for some of slots (U) have come: those at the indices `which`, int32.
  m.def("cache_answered(Tensor(a!) meta, Tensor slots, Tensor which) -> ()");
  // Writes fetched rows into slots: the first `inserted` replace, the rest are rebased (pending deltas stay on top).
  // Fresh rows are made here. init_seeds int64 (T), init_values float32 (T, 3): low, high, state, by table id.
  m.def(
      "cache_commit(Tensor(a!) meta, Tensor(b!) rows, Tensor slots, int inserted, Tensor reply_rows, "
      "Tensor reply_clocks, Tensor fresh, Tensor init_seeds, Tensor init_values, int dim) -> ()");
  // Unpins slots of a batch that is done (or given up).
  m.def("cache_release(Tensor(a!) meta, Tensor(b!) priority, Tensor slots) -> ()");
  // Fills fresh rows of a read with their initial values. rows (n, R).
  m.def(
      "init_rows(Tensor(a!) rows, Tensor fresh, Tensor keys, Tensor tables, Tensor init_seeds, Tensor init_values, "
      "int dim) -> ()");
  // Pooled lookup. rows float32 (n, stride); out (B, F * D). bag_offsets int64 (F * B + 1), feature-major; bag_of int32
  // (N), the bag of each position, absent where every bag holds one key.
  m.def(
      "bag_lookup(Tensor rows, Tensor slots, Tensor inverse, Tensor? bag_of, Tensor bag_offsets, Tensor? weights, "
      "Tensor feature_mean, int dim) -> Tensor");
  // The lookup's gradient, summed per unique row: (U, D).
  m.def(
      "bag_grad(Tensor grad, Tensor order, Tensor splits, Tensor? bag_of, Tensor bag_offsets, Tensor? weights, "
      "Tensor feature_mean, int dim, float scale) -> Tensor");
  // The lookup's gradient with respect to its weights: (N). rows and slots: see bag_lookup; grad (B, F * D).
  m.def(
      "bag_weight_grad(Tensor rows, Tensor slots, Tensor inverse, Tensor? bag_of, Tensor bag_offsets, "
      "Tensor feature_mean, Tensor grad, int dim) -> Tensor");
  // bag_grad and row_update in one pass; unpins the slots. settings and left_out: see row_update.
  m.def(
      "bag_update(Tensor(a!) rows, Tensor(b!) meta, Tensor(c!) priority, Tensor slots, Tensor grad, Tensor order, "
      "Tensor splits, Tensor? bag_of, Tensor bag_offsets, Tensor? weights, Tensor feature_mean, int dim, float scale, "
      "int optimizer, float lr, Tensor settings) -> Tensor left_out");
  // One optimizer step on each slot with its gradient (n, D). settings float32: OptimizerSettings of
  // core/optimizer.h, always in host memory. pending: the change is to be pushed; otherwise the store makes it too, and
  // the row's clock advances as it does there. left_out int64: indices of the rows that stay as they are, because the
  // gradient or the row after the step is not finite; they have nothing to push.
  m.def(
      "row_update(Tensor(a!) rows, Tensor(b!) meta, Tensor slots, Tensor grads, int dim, int optimizer, float lr, "
      "Tensor settings, bool pending) -> Tensor left_out");
  // Neighbours of seed nodes, hop by hop, uniform without replacement. Graph in CSC form, int64: the in-neighbours of
  // node v are row[colptr[v] .. colptr[v + 1]]. seeds int64 (S), distinct; fanouts: neighbours a node in each of H
  // hops, -1: all. nodes (n): the seeds in their order, then each other node once, as found; edge_index (2, E'):
  // positions in nodes of neighbour and node, hop by hop; nodes_per_hop (H + 1), edges_per_hop (H). A function of its
  // arguments.
  m.def(
      "sample_neighbors(Tensor colptr, Tensor row, Tensor seeds, int[] fanouts, int seed, int epoch, int batch) -> "
      "(Tensor nodes, Tensor edge_index, Tensor nodes_per_hop, Tensor edges_per_hop)");
}
