// One optimizer step on one row. Semantics are FBGEMM's EXACT optimizers: duplicates are summed before, one step a row.
//
// Everything is lazy: accumulators decay, and weight decay acts, at the steps that touch the row. State merges by
// addition at the server, so a step reports its change of every value.
#pragma once

#include <cmath>
#include <cstdint>

#include "hd.h"

namespace hetrec {

enum class Optimizer : int32_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2, kAdam = 3 };
constexpr int32_t kOptimizers = 4;

// Adam's state: m (dim), v (dim), and the row's own number of steps.
HETREC_HD int64_t state_dim_of(Optimizer optimizer, int64_t dim) {
  switch (optimizer) {
    case Optimizer::kSgd:
      return 0;
    case Optimizer::kAdagrad:
      return dim;
    case Optimizer::kRowwiseAdagrad:
      return 1;
    case Optimizer::kAdam:
      return 2 * dim + 1;
  }
  return 0;
}

// What a step needs beside the row, its gradient and the learning rate. Plain floats: they travel as an array.
struct OptimizerSettings {
  float eps;
  float beta1, beta2;       // Adam's
  float weight_decay;       // added to the gradient (L2); Adam's is decoupled: w -= lr * weight_decay * w
  float max_gradient;       // > 0: each value of the gradient is clamped to +-max_gradient
  float max_gradient_norm;  // > 0: then the row's gradient is scaled down to this norm
};
constexpr int64_t kOptimizerSettings = sizeof(OptimizerSettings) / sizeof(float);

// x . y over 16 lanes and a tree: an order that vectorises as it stands, for every width.
HETREC_HD float dot(const float* x, const float* y, int64_t n) {
  float lanes[16] = {};
  int64_t d = 0;
  for (; d + 16 <= n; d += 16) {
    for (int j = 0; j < 16; ++j) lanes[j] += x[d + j] * y[d + j];
  }
  for (int j = 0; j < 16 && d + j < n; ++j) lanes[j] += x[d + j] * y[d + j];
  for (int half = 8; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

// The gradient as the optimizer sees it: clipped, then with the weights' decay where that is L2.
template <Optimizer kOptimizer>
HETREC_HD void shape_gradient(float* __restrict__ grad, const float* __restrict__ weight, int64_t dim,
                              const OptimizerSettings& settings) {
  if (settings.max_gradient > 0.f) {
    const float most = settings.max_gradient;
    for (int64_t d = 0; d < dim; ++d) grad[d] = grad[d] > most ? most : grad[d] < -most ? -most : grad[d];
  }
  if (settings.max_gradient_norm > 0.f) {
    const float norm = sqrtf(dot(grad, grad, dim));
    if (norm > settings.max_gradient_norm) {
      const float scale = settings.max_gradient_norm / norm;
      for (int64_t d = 0; d < dim; ++d) grad[d] *= scale;
    }
  }
  if constexpr (kOptimizer != Optimizer::kAdam) {
    if (settings.weight_decay > 0.f) {
      for (int64_t d = 0; d < dim; ++d) grad[d] += settings.weight_decay * weight[d];
    }
  }
}

// Where a row lies: the values [weights | state] and, of a cached row, the pending deltas of the same shape.
struct RowRef {
  float* __restrict__ weight;
  float* __restrict__ state;
  float* __restrict__ weight_delta = nullptr;
  float* __restrict__ state_delta = nullptr;
};

// `grad` has `dim` values, and is altered. kPending: the same change goes into the pending delta.
template <Optimizer kOptimizer, bool kPending>
HETREC_HD void step_row(const RowRef& row, float* __restrict__ grad, int64_t dim, float lr,
                        const OptimizerSettings& settings) {
  shape_gradient<kOptimizer>(grad, row.weight, dim, settings);
  const float eps = settings.eps;
  if constexpr (kOptimizer == Optimizer::kSgd) {
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      const float change = -lr * grad[d];
      row.weight[d] += change;
      if constexpr (kPending) row.weight_delta[d] += change;
    }
  } else if constexpr (kOptimizer == Optimizer::kAdagrad) {
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      const float square = grad[d] * grad[d];
      row.state[d] += square;
      if constexpr (kPending) row.state_delta[d] += square;
      const float change = -lr * grad[d] / (sqrtf(row.state[d]) + eps);
      row.weight[d] += change;
      if constexpr (kPending) row.weight_delta[d] += change;
    }
  } else if constexpr (kOptimizer == Optimizer::kRowwiseAdagrad) {
    const float mean = dot(grad, grad, dim) / static_cast<float>(dim);
    row.state[0] += mean;
    if constexpr (kPending) row.state_delta[0] += mean;
    const float scale = -lr / (sqrtf(row.state[0]) + eps);
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      const float change = scale * grad[d];
      row.weight[d] += change;
      if constexpr (kPending) row.weight_delta[d] += change;
    }
  } else {
    float* __restrict__ m = row.state, * __restrict__ v = row.state + dim, *t = row.state + 2 * dim;
    *t += 1.f;
    if constexpr (kPending) row.state_delta[2 * dim] += 1.f;
    // 1 - beta^t, without losing the digits that the subtraction would.
    const float correction1 = -expm1f(*t * logf(settings.beta1)), correction2 = -expm1f(*t * logf(settings.beta2));
    const float one_minus_beta1 = 1.f - settings.beta1, one_minus_beta2 = 1.f - settings.beta2;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      const float m_change = one_minus_beta1 * (grad[d] - m[d]);
      m[d] += m_change;
      if constexpr (kPending) row.state_delta[d] += m_change;
      // A row that came back with deltas of others, and was rebased, may hold a v below 0.
      const float v_before = v[d] > 0.f ? v[d] : 0.f;
      const float v_after = v_before + one_minus_beta2 * (grad[d] * grad[d] - v_before);
      if constexpr (kPending) row.state_delta[dim + d] += v_after - v[d];
      v[d] = v_after;
      const float step = m[d] / correction1 / (sqrtf(v_after / correction2) + eps);
      const float change = -lr * (step + settings.weight_decay * row.weight[d]);
      row.weight[d] += change;
      if constexpr (kPending) row.weight_delta[d] += change;
    }
  }
}

HETREC_HD bool all_finite(const float* __restrict__ x, int64_t n) {
  int bad = 0;
  for (int64_t d = 0; d < n; ++d) bad |= !(x[d] - x[d] == 0.f);
  return bad == 0;
}

// As step_row, unless the gradient or a value after the step is not finite: then the row stays as it was. Weights and
// state lie side by side, and so do their deltas. `before` has room for two copies of the row. Returns whether the step
// was made.
template <Optimizer kOptimizer, bool kPending>
HETREC_HD bool try_step_row(const RowRef& row, float* __restrict__ grad, int64_t dim, float lr,
                            const OptimizerSettings& settings, float* __restrict__ before) {
  if (!all_finite(grad, dim)) return false;
  const int64_t width = dim + state_dim_of(kOptimizer, dim);
  for (int64_t d = 0; d < width; ++d) before[d] = row.weight[d];
  if constexpr (kPending) {
    for (int64_t d = 0; d < width; ++d) before[width + d] = row.weight_delta[d];
  }
  step_row<kOptimizer, kPending>(row, grad, dim, lr, settings);
  bool finite = all_finite(row.weight, width);
  if constexpr (kPending) finite = finite && all_finite(row.weight_delta, width);
  if (finite) return true;
  for (int64_t d = 0; d < width; ++d) row.weight[d] = before[d];
  if constexpr (kPending) {
    for (int64_t d = 0; d < width; ++d) row.weight_delta[d] = before[width + d];
  }
  return false;
}

// Puts right what adding up changes of several replicas can leave: Adam's v may fall below 0.
HETREC_HD void clamp_merged_state(Optimizer optimizer, float* __restrict__ state, int64_t dim) {
  if (optimizer != Optimizer::kAdam) return;
  for (int64_t d = dim; d < 2 * dim; ++d) state[d] = state[d] > 0.f ? state[d] : 0.f;
}

}  // namespace hetrec
