// Row initialisation: a pure function of (table seed, key), the same on every rank, shard and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "hd.h"
#include "philox.h"

namespace hetrec {

// How a table's rows begin: weights uniform in [low, high), optimizer state constant.
struct RowInit {
  uint64_t seed = 0;
  float low = 0.f;
  float high = 0.f;
  float state = 0.f;
};

// 24 random bits to [low, high): one fused multiply-add, so host and device round alike.
HETREC_HD float uniform_from_bits(uint32_t bits, float low, float high) {
  const float u = static_cast<float>(bits >> 8) * (1.0f / 16777216.0f);
  return fmaf(u, high - low, low);
}

// Writes one initial row: `dim` weights, then `state_dim` optimizer values. Weight 32 g + 8 w + j is word w of counter
// (key, 8 g + j): eight counters give 32 weights.
HETREC_HD void init_row(const RowInit& init, int64_t key, int64_t dim, int64_t state_dim, float* row) {
  constexpr int kLanes = 8;
  const uint32_t k0 = static_cast<uint32_t>(init.seed), k1 = static_cast<uint32_t>(init.seed >> 32);
  for (int64_t first = 0; first < dim; first += 4 * kLanes) {
    uint32_t c[4][kLanes];
    for (int j = 0; j < kLanes; ++j) {
      c[0][j] = static_cast<uint32_t>(key);
      c[1][j] = static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32);
      c[2][j] = static_cast<uint32_t>(first / 4) + static_cast<uint32_t>(j);
      c[3][j] = 0;
    }
    philox4x32(c, k0, k1);
    for (int word = 0; word < 4; ++word) {
      for (int j = 0; j < kLanes; ++j) {
        const int64_t d = first + word * kLanes + j;
        if (d < dim) row[d] = uniform_from_bits(c[word][j], init.low, init.high);
      }
    }
  }
  for (int64_t m = 0; m < state_dim; ++m) row[dim + m] = init.state;
}

}  // namespace hetrec
