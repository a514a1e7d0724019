// CRC-32C (Castagnoli, as in iSCSI, RFC 3720 appendix B.4), in hardware where the processor has it.
//
// The instruction takes 8 bytes a cycle but answers three cycles later, so three neighbouring pieces are summed side by
// side. A checksum is linear: that of two pieces together is the first one's moved past the second's length in zero
// bytes, xor the second one's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#endif

namespace hetrec {

namespace crc32c_detail {

constexpr std::array<uint32_t, 256> byte_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = c & 1 ? 0x82f63b78u ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
  return table;
}
inline constexpr std::array<uint32_t, 256> kByteTable = byte_table();

constexpr int kPieceBits = 10;
constexpr size_t kPiece = size_t{1} << kPieceBits;  // bytes of each of the three pieces

using ShiftTable = std::array<std::array<uint32_t, 256>, 4>;

// What kPiece zero bytes make of each byte of a register. As a matrix over GF(2), the step of one zero byte is squared
// kPieceBits times.
constexpr ShiftTable shift_table() {
  std::array<uint32_t, 32> columns{};
  for (int bit = 0; bit < 32; ++bit) {
    const uint32_t c = uint32_t{1} << bit;
    columns[static_cast<size_t>(bit)] = kByteTable[c & 0xff] ^ (c >> 8);
  }
  const auto times = [&columns](uint32_t vector) {
    uint32_t sum = 0;
    for (size_t bit = 0; vector != 0; ++bit, vector >>= 1) sum ^= vector & 1 ? columns[bit] : 0;
    return sum;
  };
  for (int step = 0; step < kPieceBits; ++step) {
    std::array<uint32_t, 32> squared{};
    for (size_t bit = 0; bit < 32; ++bit) squared[bit] = times(columns[bit]);
    columns = squared;
  }
  ShiftTable table{};
  for (size_t byte = 0; byte < 4; ++byte) {
    for (uint32_t i = 0; i < 256; ++i) table[byte][i] = times(i << (8 * byte));
  }
  return table;
}
inline constexpr ShiftTable kShift = shift_table();

constexpr uint32_t past_piece(uint32_t crc) {
  return kShift[0][crc & 0xff] ^ kShift[1][crc >> 8 & 0xff] ^ kShift[2][crc >> 16 & 0xff] ^ kShift[3][crc >> 24];
}

}  // namespace crc32c_detail

inline uint32_t crc32c(const void* bytes, size_t n) {
  const auto* p = static_cast<const unsigned char*>(bytes);
#if defined(__SSE4_2__)
  using crc32c_detail::kPiece, crc32c_detail::past_piece;
  const auto next = [](uint64_t crc, const unsigned char* at) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    return _mm_crc32_u64(crc, word);
  };
  uint64_t crc = 0xffffffffu;
  for (; n >= 3 * kPiece; n -= 3 * kPiece, p += 3 * kPiece) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < kPiece; i += 8) {
      crc = next(crc, p + i);
      second = next(second, p + kPiece + i);
      third = next(third, p + 2 * kPiece + i);
    }
    const uint32_t two = past_piece(static_cast<uint32_t>(crc)) ^ static_cast<uint32_t>(second);
    crc = past_piece(two) ^ static_cast<uint32_t>(third);
  }
  for (; n >= 8; n -= 8, p += 8) crc = next(crc, p);
  auto crc32 = static_cast<uint32_t>(crc);
  for (; n > 0; --n, ++p) crc32 = _mm_crc32_u8(crc32, *p);
  return ~crc32;
#else
  uint32_t crc = 0xffffffffu;
  for (; n > 0; --n, ++p) crc = crc32c_detail::kByteTable[(crc ^ *p) & 0xff] ^ (crc >> 8);
  return ~crc;
#endif
}

}  // namespace hetrec
