// Synchronous steps: the gradients that all ranks have for the same rows become one optimizer step each.
#pragma once

#include <cstdint>
#include <vector>

#include "table/embedding_table.h"

namespace hetrec {

// Gradients of one rank, (n, dim) floats. A row may occur more than once.
struct GradientView {
  int64_t rank;
  int64_t n;
  const int32_t* tables;
  const int64_t* keys;
  const float* gradients;
};

// Sums the gradients of each row, share after share and from first to last, so that the sum does not depend on who came
// first, and steps every row once. A row's clock advances by the number of ranks that had a gradient for it: so a rank
// that made the same step with its own gradient alone can tell by the clock whether that was all. A rank's shares must
// follow each other. With `skip`, kBuckets flags, only rows of buckets whose flag is 0.
void step_rows(EmbeddingTable& table, const std::vector<GradientView>& shares, float lr,
               const OptimizerSettings& settings, const uint8_t* skip = nullptr);

}  // namespace hetrec
