// Row initialisation: a pure function of (table seed, key), the same on every rank, shard and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "hd.h"

namespace hetrec {

// How a table's rows begin: weights uniform in [low, high), optimizer state constant.
struct RowInit {
  uint64_t seed = 0;
  float low = 0.f;
  float high = 0.f;
  float state = 0.f;
};

struct Philox4 {
  uint32_t v[4];
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): counter in, four words out.
HETREC_HD Philox4 philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// 24 random bits to [low, high): one fused multiply-add, so host and device round alike.
HETREC_HD float uniform_from_bits(uint32_t bits, float low, float high) {
  const float u = static_cast<float>(bits >> 8) * (1.0f / 16777216.0f);
  return fmaf(u, high - low, low);
}

// Writes one initial row: `dim` weights, then `state_dim` optimizer values.
HETREC_HD void init_row(const RowInit& init, int64_t key, int64_t dim, int64_t state_dim, float* row) {
  const uint32_t k0 = static_cast<uint32_t>(init.seed), k1 = static_cast<uint32_t>(init.seed >> 32);
  const uint32_t c0 = static_cast<uint32_t>(key), c1 = static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32);
  for (int64_t d = 0; d < dim; d += 4) {
    const Philox4 r = philox4x32(c0, c1, static_cast<uint32_t>(d >> 2), 0, k0, k1);
    for (int j = 0; j < 4 && d + j < dim; ++j) row[d + j] = uniform_from_bits(r.v[j], init.low, init.high);
  }
  for (int64_t m = 0; m < state_dim; ++m) row[dim + m] = init.state;
}

}  // namespace hetrec
