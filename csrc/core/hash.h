// Hashing of rows. A row is named by (table id, key); every int64 is a key, no value is a sentinel.
#pragma once

#include <cstdint>

#include "hd.h"

namespace hetrec {

// MurmurHash3's 64-bit finalizer (public domain, A. Appleby): a bijection that avalanches every bit.
HETREC_HD uint64_t mix64(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return x;
}

HETREC_HD uint64_t hash_row(int32_t table, int64_t key) {
  return mix64(static_cast<uint64_t>(key) ^
               (static_cast<uint64_t>(static_cast<uint32_t>(table)) + 1) * 0x9e3779b97f4a7c15ULL);
}

// The hash's bits are dealt out so that users of one row's hash stay independent:
// 63..52 virtual bucket (snapshots, shards), 51..20 cache set, 39..8 slot of a bucket's index, 7..0 tag.
constexpr int kBucketBits = 12;
constexpr int kBuckets = 1 << kBucketBits;

HETREC_HD uint32_t bucket_of(uint64_t hash) { return static_cast<uint32_t>(hash >> (64 - kBucketBits)); }

// Maps the hash onto [0, n) without a division (Lemire's multiply-shift).
HETREC_HD int64_t set_of(uint64_t hash, int64_t n_sets) {
  return static_cast<int64_t>(((hash >> 20 & 0xffffffffULL) * static_cast<uint64_t>(n_sets)) >> 32);
}

// 0 marks an empty way, so tags of rows are 1..255.
HETREC_HD uint8_t tag_of(uint64_t hash) {
  const uint8_t tag = static_cast<uint8_t>(hash & 0xff);
  return tag == 0 ? 255 : tag;
}

}  // namespace hetrec
