// Counter-based random bits: a pure function of (counter, key), the same on every host, device and thread.
#pragma once

#include <cstdint>

#include "hd.h"

namespace hetrec {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11), `kLanes` counters side by side
// so that the rounds vectorise: c[word][lane] goes from counters to random words.
template <int kLanes>
HETREC_HD void philox4x32(uint32_t (&c)[4][kLanes], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    for (int j = 0; j < kLanes; ++j) {
      const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c[0][j];
      const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c[2][j];
      c[0][j] = static_cast<uint32_t>(p1 >> 32) ^ c[1][j] ^ k0;
      c[1][j] = static_cast<uint32_t>(p1);
      c[2][j] = static_cast<uint32_t>(p0 >> 32) ^ c[3][j] ^ k1;
      c[3][j] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

}  // namespace hetrec
