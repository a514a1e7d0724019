// What lossy pushes round off: kept at the client by row, and added to the row's next push, so that no update is lost.
#pragma once

#include <cstdint>
#include <vector>

#include "core/row_codec.h"
#include "table/embedding_table.h"

namespace hetrec {

// Errors are kept as float32, which holds each exactly: fewer digits would lose what is added to them in small steps,
// for good where an int8 row's largest value leaves no digit for its smallest.
class Residuals {
 public:
  Residuals(RowCodec codec, int64_t dim, int64_t state_dim) : codec_(codec), errors_(dim, state_dim) {}

  // Writes each delta and what was kept of its row as `codec` to `out`, encoded_row_bytes() each, and keeps what that
  // rounds off. Row i's delta is the one at `places[i]`; without places, at i.
  void encode(const PushView& push, const int64_t* places, uint8_t* out);

  struct Kept {
    std::vector<int32_t> tables;
    std::vector<int64_t> keys;
    std::vector<float> rows;
  };
  // Hands out all errors that are not zero, and forgets them.
  Kept drain();

  void clear() { errors_.clear(); }
  int64_t size() const { return errors_.size(); }
  RowCodec codec() const { return codec_; }
  int64_t dim() const { return errors_.dim(); }
  int64_t state_dim() const { return errors_.state_dim(); }

 private:
  RowCodec codec_;
  EmbeddingTable errors_;
};

}  // namespace hetrec
