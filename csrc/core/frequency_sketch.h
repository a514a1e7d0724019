// What tiny_lfu and lookahead remember of rows that have no slot: their frequency, in a count-min sketch (Cormode and
// Muthukrishnan 2005, with conservative update) as TinyLFU uses it (Einziger, Friedman and Manes 2017).
//
// Every set has a sketch of its own, kSketchBytes beside its 32 ways, so sketch and ways are aged together and whoever
// works on a set needs nothing of others. It is four lines of 64 bytes; a row's hash picks a line and, in each quarter
// of it, one of 32 counters of 4 bits. The frequency is the least of the four. Raising a counter is a maximum, so the
// order in which rows of a set are remembered does not matter.
#pragma once

#include <cstdint>

#include "hash.h"
#include "hd.h"

namespace hetrec {

constexpr int kSketchBytes = 256;

struct SketchCells {
  int byte[4];
  int shift[4];
};

HETREC_HD SketchCells sketch_cells(uint64_t row_hash) {
  const uint64_t hash = mix64(row_hash + 0x9e3779b97f4a7c15ULL);  // independent of set and tag
  const int line = static_cast<int>(hash >> 20 & 3) * 64;
  SketchCells cells;
  for (int quarter = 0; quarter < 4; ++quarter) {
    const int counter = static_cast<int>(hash >> (5 * quarter) & 31);
    cells.byte[quarter] = line + 16 * quarter + counter / 2;
    cells.shift[quarter] = counter % 2 * 4;
  }
  return cells;
}

HETREC_HD int64_t remembered(const uint8_t* sketch, const SketchCells& cells) {
  int least = 15;
  for (int i = 0; i < 4; ++i) {
    const int count = sketch[cells.byte[i]] >> cells.shift[i] & 15;
    least = count < least ? count : least;
  }
  return least;
}

// Makes the row's frequency at least `frequency`.
HETREC_HD void remember(uint8_t* sketch, const SketchCells& cells, int64_t frequency) {
  for (int i = 0; i < 4; ++i) {
    uint8_t& byte = sketch[cells.byte[i]];
    if ((byte >> cells.shift[i] & 15) >= frequency) continue;
    byte = static_cast<uint8_t>((byte & ~(15 << cells.shift[i])) | frequency << cells.shift[i]);
  }
}

// Halves every frequency of a set's sketch.
HETREC_HD void age_sketch(uint8_t* sketch) {
  for (int i = 0; i < kSketchBytes; ++i) sketch[i] = sketch[i] >> 1 & 0x77;
}

}  // namespace hetrec
