// sample_neighbors: neighbours of seed nodes, hop by hop, uniformly without replacement (GraphSAGE, Hamilton et al.,
// NeurIPS 2017, section 3.1).
//
// A node's neighbours are drawn once, in the hop after the one that found it, and serve every layer. The draws of a
// node depend on (seed, epoch, batch, node) alone: neither on the other nodes of the batch nor on who samples it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/hash.h"
#include "core/philox.h"
#include "ops/cpu/tensors.h"

namespace hetrec {
namespace {

constexpr int64_t kBlock = 16;      // edges whose slots are fetched together
constexpr int64_t kAhead = 64;      // edges between the request of a neighbour's id and its use
constexpr int kLanes = 8;           // counters a Philox call
constexpr int kDraws = 2 * kLanes;  // 64-bit numbers it gives

// The graph: the in-neighbours of node v are row[colptr[v] .. colptr[v + 1]].
struct Csc {
  const int64_t* colptr;
  const int64_t* row;
  int64_t nodes;
  int64_t edges;
};

// Node -> its position in the list of sampled nodes. Open addressing, node and position side by side; no id is a
// sentinel, a free slot has position 0 and all others are stored plus one.
class Positions {
 public:
  void clear() {
    slots_.clear();
    mask_ = 0;
  }

  // Makes room for `count` nodes at a load of a half at most; `nodes` are those that are in.
  void reserve(int64_t count, const std::vector<int64_t>& nodes) {
    size_t size = 64;
    while (size < static_cast<size_t>(2 * count)) size *= 2;
    if (size <= slots_.size()) return;
    slots_.assign(size, Slot{});
    mask_ = size - 1;
    for (size_t i = 0; i < nodes.size(); ++i) put(nodes[i], static_cast<int64_t>(i));
  }

  static uint64_t hash(int64_t node) { return mix64(static_cast<uint64_t>(node)); }

  void prefetch(uint64_t hash) const { __builtin_prefetch(&slots_[hash & mask_]); }

  // The node's position, which is `next` where it was not in.
  int64_t find_or_put(int64_t node, uint64_t hash, int64_t next) {
    for (uint64_t at = hash & mask_;; at = (at + 1) & mask_) {
      Slot& slot = slots_[at];
      if (slot.position == 0) {
        slot = {node, next + 1};
        return next;
      }
      if (slot.node == node) return slot.position - 1;
    }
  }

 private:
  struct Slot {
    int64_t node = 0;
    int64_t position = 0;
  };

  void put(int64_t node, int64_t position) { find_or_put(node, hash(node), position); }

  std::vector<Slot> slots_;
  uint64_t mask_ = 0;
};

// Draws subsets of {0 .. n - 1}, each of the same probability (to one in 2^64 / n).
class Draws {
 public:
  Draws(int64_t seed, int64_t epoch, int64_t batch) {
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;  // 0, 0, 0 would stay 0
    uint64_t key = mix64(static_cast<uint64_t>(seed) + kGolden);
    key = mix64((key ^ static_cast<uint64_t>(epoch)) + kGolden);
    key_ = mix64((key ^ static_cast<uint64_t>(batch)) + kGolden);
  }

  // Writes a subset of size k < n, plus `offset` each (R. Floyd, in J. Bentley, "Programming pearls", CACM 30(9),
  // 1987).
  void subset(int64_t node, int64_t n, int64_t k, int64_t offset, int64_t* out) {
    const auto words = static_cast<size_t>(n / 64 + 1);
    if (taken_.size() < words) taken_.resize(words, 0);
    uint64_t random[kDraws];
    for (int64_t i = 0; i < k; ++i) {
      if (i % kDraws == 0) fill(node, i / kDraws, random);
      const int64_t last = n - k + i;
      int64_t pick = below(random[i % kDraws], last + 1);
      if (taken_[static_cast<size_t>(pick / 64)] >> (pick % 64) & 1) pick = last;
      taken_[static_cast<size_t>(pick / 64)] |= 1ULL << (pick % 64);
      out[i] = offset + pick;
    }
    for (int64_t i = 0; i < k; ++i) taken_[static_cast<size_t>((out[i] - offset) / 64)] = 0;
  }

 private:
  // Number 8 h + j of a block is words 2 h, 2 h + 1 of counter (node, 8 block + j).
  void fill(int64_t node, int64_t block, uint64_t* random) const {
    uint32_t c[4][kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const auto counter = static_cast<uint64_t>(block * kLanes + j);
      c[0][j] = static_cast<uint32_t>(node);
      c[1][j] = static_cast<uint32_t>(static_cast<uint64_t>(node) >> 32);
      c[2][j] = static_cast<uint32_t>(counter);
      c[3][j] = static_cast<uint32_t>(counter >> 32);
    }
    philox4x32(c, static_cast<uint32_t>(key_), static_cast<uint32_t>(key_ >> 32));
    for (int h = 0; h < 2; ++h) {
      for (int j = 0; j < kLanes; ++j) {
        random[h * kLanes + j] = static_cast<uint64_t>(c[2 * h + 1][j]) << 32 | c[2 * h][j];
      }
    }
  }

  // 64 random bits to 0 .. n - 1 (Lemire's multiply-shift).
  static int64_t below(uint64_t random, int64_t n) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<int64_t>(static_cast<Wide>(random) * static_cast<uint64_t>(n) >> 64);
  }

  uint64_t key_ = 0;
  std::vector<uint64_t> taken_;  // a bit a neighbour; all 0 between calls
};

// What a call works with; kept by the thread, since every batch needs about the same room.
struct Work {
  Positions positions;
  std::vector<int64_t> nodes;             // sampled nodes, seeds first
  std::vector<int64_t> starts, degrees;   // of the nodes of the current hop
  std::vector<int64_t> picks;             // edges drawn in the current hop, as positions in `row`
  std::vector<int64_t> sources, targets;  // of all hops, as positions in `nodes`
};

void take_seeds(const Csc& graph, const int64_t* seed_nodes, int64_t n, Work& work) {
  work.nodes.clear();
  work.positions.clear();
  work.positions.reserve(n, work.nodes);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t node = seed_nodes[i];
    STD_TORCH_CHECK(node >= 0 && node < graph.nodes, "seeds[", i, "] is node ", node, "; the graph has nodes 0 .. ",
                    graph.nodes - 1);
    const int64_t position = work.positions.find_or_put(node, Positions::hash(node), i);
    STD_TORCH_CHECK(position == i, "seeds[", position, "] and seeds[", i, "] are both node ", node,
                    "; every seed must be another node");
    work.nodes.push_back(node);
  }
}

// Degrees of the nodes from `begin` on; returns the number of edges to draw.
int64_t count_edges(const Csc& graph, size_t begin, int64_t fanout, Work& work) {
  const size_t count = work.nodes.size() - begin;
  const int64_t* nodes = work.nodes.data() + begin;
  work.starts.resize(count);
  work.degrees.resize(count);
  int64_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    if (i + kBlock < count) __builtin_prefetch(&graph.colptr[nodes[i + kBlock]]);
    const int64_t start = graph.colptr[nodes[i]], stop = graph.colptr[nodes[i] + 1];
    STD_TORCH_CHECK(0 <= start && start <= stop && stop <= graph.edges, "colptr gives node ", nodes[i], " the edges ",
                    start, " .. ", stop, " of ", graph.edges);
    work.starts[i] = start;
    work.degrees[i] = stop - start;
    total += fanout < 0 ? stop - start : std::min(fanout, stop - start);
  }
  return total;
}

void draw_edges(size_t begin, int64_t fanout, int64_t total, Draws& draws, Work& work) {
  work.picks.resize(static_cast<size_t>(total));
  work.targets.reserve(work.targets.size() + static_cast<size_t>(total));
  int64_t* out = work.picks.data();
  for (size_t i = 0; i < work.starts.size(); ++i) {
    const int64_t start = work.starts[i], degree = work.degrees[i];
    const bool all = fanout < 0 || degree <= fanout;
    const int64_t count = all ? degree : fanout;
    if (all) {
      for (int64_t j = 0; j < count; ++j) out[j] = start + j;
    } else {
      draws.subset(work.nodes[begin + i], degree, count, start, out);
    }
    out += count;
    work.targets.insert(work.targets.end(), static_cast<size_t>(count), static_cast<int64_t>(begin + i));
  }
}

// Gives the drawn edges' sources positions; new ones go to the end of the list.
void place_sources(const Csc& graph, Work& work) {
  const auto total = static_cast<int64_t>(work.picks.size());
  const int64_t* picks = work.picks.data();
  const auto known = static_cast<int64_t>(work.nodes.size());
  work.positions.reserve(std::min(known + total, graph.nodes), work.nodes);
  const size_t first = work.sources.size();
  work.sources.resize(first + work.picks.size());
  int64_t* sources = work.sources.data() + first;
  int64_t neighbors[kBlock];
  uint64_t hashes[kBlock];
  for (int64_t begin = 0; begin < total; begin += kBlock) {
    const int64_t count = std::min(kBlock, total - begin);
    for (int64_t i = begin + kAhead; i < std::min(begin + kAhead + kBlock, total); ++i) {
      __builtin_prefetch(&graph.row[picks[i]]);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t node = graph.row[picks[begin + i]];
      STD_TORCH_CHECK(node >= 0 && node < graph.nodes, "row[", picks[begin + i], "] is node ", node,
                      "; the graph has nodes 0 .. ", graph.nodes - 1);
      neighbors[i] = node;
      hashes[i] = Positions::hash(node);
      work.positions.prefetch(hashes[i]);
    }
    for (int64_t i = 0; i < count; ++i) {
      const auto next = static_cast<int64_t>(work.nodes.size());
      const int64_t position = work.positions.find_or_put(neighbors[i], hashes[i], next);
      if (position == next) work.nodes.push_back(neighbors[i]);
      sources[begin + i] = position;
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample_neighbors(const Tensor& colptr, const Tensor& row,
                                                            const Tensor& seeds, std::vector<int64_t> fanouts,
                                                            int64_t seed, int64_t epoch, int64_t batch) {
  const Csc graph{data<const int64_t>(colptr, "colptr"), data<const int64_t>(row, "row"), colptr.numel() - 1,
                  row.numel()};
  const auto* seed_nodes = data<const int64_t>(seeds, "seeds");
  STD_TORCH_CHECK(graph.nodes >= 0, "colptr is empty; a graph of n nodes has n + 1 entries");
  for (const int64_t fanout : fanouts) {
    STD_TORCH_CHECK(fanout == -1 || fanout >= 1, "a fan-out is ", fanout, "; expected 1 or more, or -1 for all");
  }

  thread_local Work work;
  Draws draws(seed, epoch, batch);
  take_seeds(graph, seed_nodes, seeds.numel(), work);
  work.sources.clear();
  work.targets.clear();
  std::vector<int64_t> nodes_per_hop{seeds.numel()}, edges_per_hop;
  size_t begin = 0;
  for (const int64_t fanout : fanouts) {
    const size_t end = work.nodes.size();
    const int64_t total = count_edges(graph, begin, fanout, work);
    draw_edges(begin, fanout, total, draws, work);
    place_sources(graph, work);
    nodes_per_hop.push_back(static_cast<int64_t>(work.nodes.size() - end));
    edges_per_hop.push_back(total);
    begin = end;
  }

  const auto edges = static_cast<int64_t>(work.sources.size());
  Tensor edge_index = empty<int64_t>({2, edges});
  auto* out = data<int64_t>(edge_index, "edge_index");
  std::copy(work.sources.begin(), work.sources.end(), out);
  std::copy(work.targets.begin(), work.targets.end(), out + edges);
  return {from_values(work.nodes.data(), static_cast<int64_t>(work.nodes.size())), edge_index,
          from_values(nodes_per_hop.data(), static_cast<int64_t>(nodes_per_hop.size())),
          from_values(edges_per_hop.data(), static_cast<int64_t>(edges_per_hop.size()))};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hetrec, CPU, m) { m.impl("sample_neighbors", TORCH_BOX(&sample_neighbors)); }

}  // namespace hetrec
