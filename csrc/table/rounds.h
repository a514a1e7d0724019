// Synchronous steps: the gradients that all ranks have for the same rows become one optimizer step each.
#pragma once

#include <cstdint>
#include <vector>

#include "table/embedding_table.h"

namespace hetrec {

// One rank's gradients, (n, dim) floats. A row may occur more than once.
struct GradientView {
  int64_t n;
  const int32_t* tables;
  const int64_t* keys;
  const float* gradients;
};

// Sums the gradients of each row, share after share and from first to last, so that the sum does not depend on who came
// first, and steps every row once. With `skip`, kBuckets flags, only rows of buckets whose flag is 0.
void step_rows(EmbeddingTable& table, const std::vector<GradientView>& shares, float lr,
               const OptimizerSettings& settings, const uint8_t* skip = nullptr);

}  // namespace hetrec
