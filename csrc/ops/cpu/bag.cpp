// bag_lookup, bag_grad, bag_weight_grad, bag_update, row_update: pooled reads, and steps on cached rows.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/optimizer.h"
#include "ops/cpu/slots.h"

namespace hetrec {
namespace {

// A pooled batch: bag i belongs to feature i / samples and sample i % samples; its output lies at (sample, feature *
// dim).
struct Bags {
  const int64_t* offsets;
  const float* weights;  // per position, or null
  const uint8_t* mean;   // per feature
  int64_t samples;
  int64_t features;
  bool single;  // every bag holds one key, without a weight

  Bags(const Tensor& offsets_t, const std::optional<Tensor>& bag_of_t, const std::optional<Tensor>& weights_t,
       const Tensor& mean_t)
      : offsets(data<const int64_t>(offsets_t, "bag_offsets")),
        weights(data_or_null<const float>(weights_t, "weights")),
        mean(data<const uint8_t>(mean_t, "feature_mean")),
        samples(mean_t.numel() == 0 ? 0 : (offsets_t.numel() - 1) / mean_t.numel()),
        features(mean_t.numel()),
        single(!bag_of_t.has_value() && !weights_t.has_value()) {
    STD_TORCH_CHECK(offsets_t.numel() == samples * features + 1,
                    "bag_offsets must have features x samples + 1 entries, got ", offsets_t.numel(), " for ", features,
                    " features");
  }

  // TorchRec's rule: mean divides by the bag's length, also where it is weighted.
  float scale(int64_t bag, int64_t feature, int64_t position) const {
    const float weight = weights == nullptr ? 1.f : weights[position];
    return mean[feature] ? weight / static_cast<float>(offsets[bag + 1] - offsets[bag]) : weight;
  }
};

// kDim > 0: the width is known to the compiler. Bags of one key, unweighted, are the common case (`bags.single`): a
// copy.
template <int kDim>
void lookup(const float* rows, int64_t stride, const int64_t* slots, const int32_t* inverse, const Bags& bags,
            int64_t runtime_dim, float* out) {
  const int64_t dim = kDim > 0 ? kDim : runtime_dim;
  const int64_t n = bags.offsets[bags.samples * bags.features];
  for (int64_t b = 0; b < bags.samples; ++b) {
    for (int64_t f = 0; f < bags.features; ++f) {
      const int64_t bag = f * bags.samples + b;
      float* __restrict__ to = out + (b * bags.features + f) * dim;
      // The same feature's bag a sample on: its row is needed only after all features of this one.
      if (bags.single) {
        if (b + 1 < bags.samples) prefetch_floats<0>(rows + slots[inverse[bag + 1]] * stride, dim);
        const float* row = rows + slots[inverse[bag]] * stride;
        for (int64_t d = 0; d < dim; ++d) to[d] = row[d];
        continue;
      }
      const int64_t begin = bags.offsets[bag], end = bags.offsets[bag + 1];
      if (end < n) prefetch_floats<0>(rows + slots[inverse[end]] * stride, dim);
      if (begin == end) std::fill_n(to, dim, 0.f);
      for (int64_t p = begin; p < end; ++p) {
        const float* row = rows + slots[inverse[p]] * stride;
        const float scale = bags.scale(bag, f, p);
        if (p == begin) {
          for (int64_t d = 0; d < dim; ++d) to[d] = scale * row[d];
        } else {
          for (int64_t d = 0; d < dim; ++d) to[d] += scale * row[d];
        }
      }
    }
  }
}

Tensor bag_lookup(const Tensor& rows_t, const Tensor& slots_t, const Tensor& inverse_t, std::optional<Tensor> bag_of_t,
                  const Tensor& offsets_t, std::optional<Tensor> weights_t, const Tensor& mean_t, int64_t dim) {
  const Bags bags(offsets_t, bag_of_t, weights_t, mean_t);
  const auto* rows = data<const float>(rows_t, "rows");
  const int64_t stride = rows_t.size(0) == 0 ? 0 : rows_t.numel() / rows_t.size(0);
  const auto* slots = data<const int64_t>(slots_t, "slots");
  const auto* inverse = data<const int32_t>(inverse_t, "inverse");
  STD_TORCH_CHECK(bags.offsets[bags.samples * bags.features] == inverse_t.numel(), "lengths sum to ",
                  bags.offsets[bags.samples * bags.features], ", but there are ", inverse_t.numel(), " keys");
  Tensor out_t = empty<float>({bags.samples, bags.features * dim});
  auto* out = data<float>(out_t, "out");
  switch (dim) {
    case 16:
      lookup<16>(rows, stride, slots, inverse, bags, dim, out);
      break;
    case 32:
      lookup<32>(rows, stride, slots, inverse, bags, dim, out);
      break;
    case 128:
      lookup<128>(rows, stride, slots, inverse, bags, dim, out);
      break;
    default:
      lookup<0>(rows, stride, slots, inverse, bags, dim, out);
  }
  return out_t;
}

// Sums the gradients of unique rows, one after the other, and hands each sum to `use(row, sum)`, which may alter it.
struct Gradients {
  const float* grad;
  const int32_t* order;
  const int32_t* splits;
  const int32_t* bag_of;  // null: bag i holds position i alone
  Bags bags;
  float scale;
  int64_t n_unique;

  Gradients(const Tensor& grad_t, const Tensor& order_t, const Tensor& splits_t, const std::optional<Tensor>& bag_of_t,
            const Tensor& offsets_t, const std::optional<Tensor>& weights_t, const Tensor& mean_t, int64_t dim,
            double scale)
      : grad(data<const float>(grad_t, "grad")),
        order(data<const int32_t>(order_t, "order")),
        splits(data<const int32_t>(splits_t, "splits")),
        bag_of(data_or_null<const int32_t>(bag_of_t, "bag_of")),
        bags(offsets_t, bag_of_t, weights_t, mean_t),
        scale(static_cast<float>(scale)),
        n_unique(splits_t.numel() - 1) {
    STD_TORCH_CHECK(grad_t.numel() == bags.samples * bags.features * dim, "grad must be (samples, features x dim), ",
                    bags.samples * bags.features * dim, " values; got ", grad_t.numel());
  }

  template <int kDim, typename Use>
  void for_each(int64_t runtime_dim, Use use) const {
    const int64_t dim = kDim > 0 ? kDim : runtime_dim;
    alignas(64) float known[kDim > 0 ? kDim : 1];
    std::vector<float> unknown(kDim > 0 ? 0 : static_cast<size_t>(dim));
    float* __restrict__ sum = kDim > 0 ? known : unknown.data();
    const int64_t n = splits[n_unique];
    // Gradients are visited at random: where the next ones lie is worked out, and fetched, kAhead positions early.
    struct Source {
      const float* at;
      float scale;
    };
    Source ring[kAhead];
    const auto samples = static_cast<uint32_t>(bags.samples);
    const auto look_ahead = [&](int64_t j) {
      const int64_t position = order[j];
      const int64_t bag = bag_of == nullptr ? position : bag_of[position];
      const int64_t feature = static_cast<uint32_t>(bag) / samples;
      const float* at = grad + ((bag - feature * bags.samples) * bags.features + feature) * dim;
      prefetch_floats<0>(at, dim);
      ring[j % kAhead] = {at, bags.single ? scale : scale * bags.scale(bag, feature, position)};
    };
    for (int64_t j = 0; j < std::min(n, kAhead); ++j) look_ahead(j);
    for (int64_t u = 0; u < n_unique; ++u) {
      for (int64_t j = splits[u]; j < splits[u + 1]; ++j) {
        const Source source = ring[j % kAhead];
        if (j + kAhead < n) look_ahead(j + kAhead);
        const float* __restrict__ g = source.at;
        if (j == splits[u]) {
          for (int64_t d = 0; d < dim; ++d) sum[d] = source.scale * g[d];
        } else {
          for (int64_t d = 0; d < dim; ++d) sum[d] += source.scale * g[d];
        }
      }
      use(u, sum);
    }
  }
};

Tensor bag_grad(const Tensor& grad_t, const Tensor& order_t, const Tensor& splits_t, std::optional<Tensor> bag_of_t,
                const Tensor& offsets_t, std::optional<Tensor> weights_t, const Tensor& mean_t, int64_t dim,
                double scale) {
  const Gradients gradients(grad_t, order_t, splits_t, bag_of_t, offsets_t, weights_t, mean_t, dim, scale);
  Tensor out_t = empty<float>({gradients.n_unique, dim});
  auto* out = data<float>(out_t, "out");
  gradients.for_each<0>(dim, [&](int64_t u, const float* sum) { std::copy_n(sum, dim, out + u * dim); });
  return out_t;
}

RowRef row_ref(const Slots& slots, int64_t slot, int64_t dim) {
  float* values = slots.values(slot);
  float* deltas = slots.deltas(slot);
  return {values, values + dim, deltas, deltas + dim};
}

OptimizerSettings settings_of(const Tensor& tensor) {
  OptimizerSettings settings;
  const auto* values = data<const float>(tensor, "settings");
  STD_TORCH_CHECK(tensor.numel() == kOptimizerSettings, "an optimizer has ", kOptimizerSettings, " settings, got ",
                  tensor.numel());
  std::memcpy(&settings, values, sizeof(settings));
  return settings;
}

// Calls `run` with the optimizer and the width as compile-time constants where they are common.
template <typename Run>
void dispatch(int64_t optimizer, int64_t dim, int64_t width, Run run) {
  const auto with_dim = [&]<Optimizer kOptimizer>() {
    STD_TORCH_CHECK(width == dim + state_dim_of(kOptimizer, dim), "rows are ", width, " wide, which does not fit dim ",
                    dim, " with this optimizer");
    switch (dim) {
      case 16:
        return run.template operator()<kOptimizer, 16>();
      case 32:
        return run.template operator()<kOptimizer, 32>();
      case 128:
        return run.template operator()<kOptimizer, 128>();
      default:
        return run.template operator()<kOptimizer, 0>();
    }
  };
  switch (static_cast<Optimizer>(optimizer)) {
    case Optimizer::kSgd:
      return with_dim.template operator()<Optimizer::kSgd>();
    case Optimizer::kAdagrad:
      return with_dim.template operator()<Optimizer::kAdagrad>();
    case Optimizer::kRowwiseAdagrad:
      return with_dim.template operator()<Optimizer::kRowwiseAdagrad>();
    case Optimizer::kAdam:
      return with_dim.template operator()<Optimizer::kAdam>();
  }
  STD_TORCH_CHECK(false, "unknown optimizer ", optimizer);
}

// What a bag's weight does to the loss: the product of its row with the gradient of its bag.
Tensor bag_weight_grad(const Tensor& rows_t, const Tensor& slots_t, const Tensor& inverse_t,
                       std::optional<Tensor> bag_of_t, const Tensor& offsets_t, const Tensor& mean_t,
                       const Tensor& grad_t, int64_t dim) {
  const Bags bags(offsets_t, bag_of_t, std::nullopt, mean_t);
  const auto* rows = data<const float>(rows_t, "rows");
  const int64_t stride = rows_t.size(0) == 0 ? 0 : rows_t.numel() / rows_t.size(0);
  const auto* slots = data<const int64_t>(slots_t, "slots");
  const auto* inverse = data<const int32_t>(inverse_t, "inverse");
  const auto* grad = data<const float>(grad_t, "grad");
  STD_TORCH_CHECK(bags.offsets[bags.samples * bags.features] == inverse_t.numel(), "lengths sum to ",
                  bags.offsets[bags.samples * bags.features], ", but there are ", inverse_t.numel(), " keys");
  STD_TORCH_CHECK(grad_t.numel() == bags.samples * bags.features * dim, "grad must be (samples, features x dim), ",
                  bags.samples * bags.features * dim, " values; got ", grad_t.numel());
  Tensor out_t = empty<float>({inverse_t.numel()});
  auto* out = data<float>(out_t, "out");
  for (int64_t f = 0; f < bags.features; ++f) {
    for (int64_t b = 0; b < bags.samples; ++b) {
      const int64_t bag = f * bags.samples + b;
      const float* g = grad + (b * bags.features + f) * dim;
      for (int64_t p = bags.offsets[bag]; p < bags.offsets[bag + 1]; ++p) {
        out[p] = bags.scale(bag, f, p) * dot(rows + slots[inverse[p]] * stride, g, dim);
      }
    }
  }
  return out_t;
}

Tensor bag_update(Tensor rows_t, Tensor meta_t, Tensor priority_t, const Tensor& slots_t, const Tensor& grad_t,
                  const Tensor& order_t, const Tensor& splits_t, std::optional<Tensor> bag_of_t,
                  const Tensor& offsets_t, std::optional<Tensor> weights_t, const Tensor& mean_t, int64_t dim,
                  double scale, int64_t optimizer, double lr, const Tensor& settings_t) {
  const Slots slots(meta_t, rows_t);
  const OptimizerSettings settings = settings_of(settings_t);
  auto* priority = data<int64_t>(priority_t, "priority");
  const int64_t capacity = priority_t.numel();
  const auto* slot_of = data<const int64_t>(slots_t, "slots");
  const Gradients gradients(grad_t, order_t, splits_t, bag_of_t, offsets_t, weights_t, mean_t, dim, scale);
  STD_TORCH_CHECK(slots_t.numel() == gradients.n_unique, "one slot a unique row is needed");
  std::vector<float> before(static_cast<size_t>(2 * slots.width));
  std::vector<int64_t> left_out;
  dispatch(optimizer, dim, slots.width, [&]<Optimizer kOptimizer, int kDim>() {
    gradients.for_each<kDim>(dim, [&](int64_t u, float* sum) {
      if (u + kAhead < gradients.n_unique) {
        slots.prefetch(slot_of[u + kAhead]);
        if (slot_of[u + kAhead] < capacity) __builtin_prefetch(priority + slot_of[u + kAhead], 1);
      }
      const int64_t slot = slot_of[u];
      SlotMeta& meta = slots.meta[slot];
      if (try_step_row<kOptimizer, true>(row_ref(slots, slot, kDim > 0 ? kDim : dim), sum, kDim > 0 ? kDim : dim,
                                         static_cast<float>(lr), settings, before.data())) {
        ++meta.pending;
      } else {
        left_out.push_back(u);
      }
      if (--meta.pins == 0 && slot < capacity) priority[slot] &= ~kPinned;
    });
  });
  return from_values(left_out.data(), static_cast<int64_t>(left_out.size()));
}

Tensor row_update(Tensor rows_t, Tensor meta_t, const Tensor& slots_t, const Tensor& grads_t, int64_t dim,
                  int64_t optimizer, double lr, const Tensor& settings_t, bool pending) {
  const Slots slots(meta_t, rows_t);
  const OptimizerSettings settings = settings_of(settings_t);
  const auto* slot_of = data<const int64_t>(slots_t, "slots");
  const auto* grads = data<const float>(grads_t, "grads");
  STD_TORCH_CHECK(grads_t.numel() == slots_t.numel() * dim, "one gradient of ", dim, " values a slot is needed");
  std::vector<float> grad(static_cast<size_t>(dim)), before(static_cast<size_t>(2 * slots.width));
  std::vector<int64_t> left_out;
  dispatch(optimizer, dim, slots.width, [&]<Optimizer kOptimizer, int kDim>() {
    for (int64_t i = 0; i < slots_t.numel(); ++i) {
      std::copy_n(grads + i * dim, dim, grad.data());
      const RowRef row = row_ref(slots, slot_of[i], dim);
      SlotMeta& meta = slots.meta[slot_of[i]];
      bool made;
      if (pending) {
        made = try_step_row<kOptimizer, true>(row, grad.data(), dim, static_cast<float>(lr), settings, before.data());
        if (made) ++meta.pending;
      } else {
        made = try_step_row<kOptimizer, false>(row, grad.data(), dim, static_cast<float>(lr), settings, before.data());
        ++meta.start_clock;  // also where the step was left out: the store counts it, and leaves it out too
      }
      if (!made) left_out.push_back(i);
    }
  });
  return from_values(left_out.data(), static_cast<int64_t>(left_out.size()));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hetrec, CPU, m) {
  m.impl("bag_lookup", TORCH_BOX(&bag_lookup));
  m.impl("bag_grad", TORCH_BOX(&bag_grad));
  m.impl("bag_weight_grad", TORCH_BOX(&bag_weight_grad));
  m.impl("bag_update", TORCH_BOX(&bag_update));
  m.impl("row_update", TORCH_BOX(&row_update));
}

}  // namespace hetrec
