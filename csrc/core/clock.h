// HET's clock rules (Miao et al., VLDB'22, sections 3.2 and 4). c_g: a row's global clock at the server; c_s, c_c:
// start and current clock of a replica. c_c = c_s + pending, where pending counts the updates since the row was last
// fetched.
#pragma once

#include <cstdint>

#include "hd.h"

namespace hetrec {

enum class ClockRule : int32_t {
  kLamport = 0,  // c_g = max(c_g, c_c): the paper
  kSum = 1,      // c_g += c_c - c_s: counts every update
};

HETREC_HD int64_t merge_clock(ClockRule rule, int64_t global, int64_t start, int64_t current) {
  if (rule == ClockRule::kSum) return global + (current - start);
  return global > current ? global : current;
}

// First half of Valid(k), decided by the rank: c_c <= c_s + s. `to_come` counts the updates that batches in flight will
// still make, so that looking ahead does not loosen the bound.
HETREC_HD bool write_is_fresh(int64_t pending, int64_t to_come, int64_t staleness) {
  return pending + to_come <= staleness;
}

// Second half, decided by the server: c_g <= c_c + s.
HETREC_HD bool read_is_fresh(int64_t global, int64_t current, int64_t staleness) {
  return global - current <= staleness;
}

// How far others had moved on when the server answered a check: c_g - c_c, counted by powers of two.
constexpr int kLagBins = 18;

// Bin 0: lag <= 0; bin i: 2^(i - 1) <= lag < 2^i; the last one is open-ended.
HETREC_HD int lag_bin(int64_t lag) {
  int bin = 0;
  for (; lag > 0 && bin < kLagBins - 1; lag >>= 1) ++bin;
  return bin;
}

}  // namespace hetrec
