// One optimizer step on one row. Semantics are FBGEMM's EXACT optimizers: duplicates are summed before, one step a row.
#pragma once

#include <cmath>
#include <cstdint>

#include "hd.h"

namespace hetrec {

enum class Optimizer : int32_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2 };

HETREC_HD int64_t state_dim_of(Optimizer optimizer, int64_t dim) {
  switch (optimizer) {
    case Optimizer::kSgd:
      return 0;
    case Optimizer::kAdagrad:
      return dim;
    case Optimizer::kRowwiseAdagrad:
      return 1;
  }
  return 0;
}

// Sum of squares over 16 lanes and a tree: an order that vectorises as it stands, for every width.
HETREC_HD float sum_of_squares(const float* __restrict__ x, int64_t n) {
  float lanes[16] = {};
  int64_t d = 0;
  for (; d + 16 <= n; d += 16) {
    for (int j = 0; j < 16; ++j) lanes[j] += x[d + j] * x[d + j];
  }
  for (int j = 0; j < 16 && d + j < n; ++j) lanes[j] += x[d + j] * x[d + j];
  for (int half = 8; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

// Where a cached row lies: the values [weights | state] and, beside them, the pending deltas of the same shape.
struct RowRef {
  float* __restrict__ weight;
  float* __restrict__ state;
  float* __restrict__ weight_delta;
  float* __restrict__ state_delta;
};

// `grad` has `dim` values. The same change goes into the value and into the pending delta.
template <Optimizer kOptimizer>
HETREC_HD void step_row(const RowRef& row, const float* __restrict__ grad, int64_t dim, float lr, float eps) {
  if constexpr (kOptimizer == Optimizer::kSgd) {
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      const float change = -lr * grad[d];
      row.weight[d] += change;
      row.weight_delta[d] += change;
    }
  } else if constexpr (kOptimizer == Optimizer::kAdagrad) {
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      const float square = grad[d] * grad[d];
      row.state[d] += square;
      row.state_delta[d] += square;
      const float change = -lr * grad[d] / (sqrtf(row.state[d]) + eps);
      row.weight[d] += change;
      row.weight_delta[d] += change;
    }
  } else {
    const float mean = sum_of_squares(grad, dim) / static_cast<float>(dim);
    row.state[0] += mean;
    row.state_delta[0] += mean;
    const float scale = -lr / (sqrtf(row.state[0]) + eps);
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      const float change = scale * grad[d];
      row.weight[d] += change;
      row.weight_delta[d] += change;
    }
  }
}

}  // namespace hetrec
