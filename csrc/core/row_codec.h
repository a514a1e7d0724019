// How rows travel: weights as float32, float16, bfloat16, or int8 with a scale a row; to the nearest value, ties to
// even.
//
// Optimizer state needs range more than digits (a mean of squares of 1e-8 must not become 0), so beside any lossy codec
// it travels as bfloat16. Weights beyond float16's range are clamped: what is lost stays with the sender, as any
// rounding.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace hetrec {

enum class RowCodec : uint8_t { kFp32 = 0, kFp16 = 1, kBf16 = 2, kInt8 = 3 };
constexpr int kRowCodecs = 4;

inline RowCodec state_codec(RowCodec codec) { return codec == RowCodec::kFp32 ? RowCodec::kFp32 : RowCodec::kBf16; }

inline int64_t encoded_bytes(RowCodec codec, int64_t n) {
  switch (codec) {
    case RowCodec::kFp32:
      return 4 * n;
    case RowCodec::kFp16:
    case RowCodec::kBf16:
      return 2 * n;
    case RowCodec::kInt8:
      return 4 + n;  // the float32 scale, then the values
  }
  return 0;
}

// Bytes of one row: its weights, then its state.
inline int64_t encoded_row_bytes(RowCodec codec, int64_t dim, int64_t state_dim) {
  return encoded_bytes(codec, dim) + encoded_bytes(state_codec(codec), state_dim);
}

inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline float bf16_to_float(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float fp16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = h >> 10 & 0x1f;
  const uint32_t fraction = h & 0x3ff;
  float x;
  if (exponent == 0) {
    x = static_cast<float>(fraction) * 0x1p-24f;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits |= sign;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  const uint32_t bits =
      sign | (exponent == 31 ? 0x7f800000u | fraction << 13 : (exponent + 112) << 23 | fraction << 13);
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint16_t float_to_fp16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00;   // NaN
  if (bits >= 0x477fe000u) return sign | 0x7bff;  // 65,504, the largest
  if (bits < 0x38800000u) {                       // subnormal: let the float adder round to a multiple of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return sign | static_cast<uint16_t>(bits - 0x3f000000u);
  }
  bits += 0xfffu + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>((bits - 0x38000000u) >> 13);
}

inline void encode_values(RowCodec codec, const float* values, int64_t n, uint8_t* out) {
  switch (codec) {
    case RowCodec::kFp32:
      std::memcpy(out, values, static_cast<size_t>(4 * n));
      return;
    case RowCodec::kFp16: {
      int64_t d = 0;
#if defined(__F16C__) && defined(__AVX__)
      for (; d + 8 <= n; d += 8) {
        // With the value as second operand, minimum and maximum let NaN through.
        const __m256 low = _mm256_max_ps(_mm256_set1_ps(-65504.f), _mm256_loadu_ps(values + d));
        const __m128i half = _mm256_cvtps_ph(_mm256_min_ps(_mm256_set1_ps(65504.f), low), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * d), half);
      }
#endif
      for (; d < n; ++d) {
        const uint16_t half = float_to_fp16(values[d]);
        std::memcpy(out + 2 * d, &half, 2);
      }
      return;
    }
    case RowCodec::kBf16:
      for (int64_t d = 0; d < n; ++d) {
        const uint16_t half = float_to_bf16(values[d]);
        std::memcpy(out + 2 * d, &half, 2);
      }
      return;
    case RowCodec::kInt8: {
      // Magnitudes compare as integers too, and the compiler may take the largest of those in any order. NaN counts
      // not.
      int32_t largest_bits = 0;
      for (int64_t d = 0; d < n; ++d) {
        int32_t bits;
        std::memcpy(&bits, values + d, 4);
        bits &= 0x7fffffff;
        bits = bits > 0x7f800000 ? 0 : bits;
        largest_bits = bits > largest_bits ? bits : largest_bits;
      }
      float largest;
      std::memcpy(&largest, &largest_bits, 4);
      const float scale = largest < 0x1p-100f ? 0.f : largest / 127.f;  // its inverse must be finite
      std::memcpy(out, &scale, 4);
      const float inverse = scale > 0.f ? 1.f / scale : 0.f;
      uint8_t* __restrict digits = out + 4;
      for (int64_t d = 0; d < n; ++d) {
        float value = values[d] * inverse;
        value = value > -127.f ? value : -127.f;  // NaN, too
        value = value < 127.f ? value : 127.f;
        value += 0x1.8p23f;  // one unit is this number's last digit: the adder rounds, and the low byte is the result
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        digits[d] = static_cast<uint8_t>(bits);
      }
      return;
    }
  }
}

inline void decode_values(RowCodec codec, const uint8_t* in, int64_t n, float* values) {
  switch (codec) {
    case RowCodec::kFp32:
      std::memcpy(values, in, static_cast<size_t>(4 * n));
      return;
    case RowCodec::kFp16: {
      int64_t d = 0;
#if defined(__F16C__) && defined(__AVX__)
      for (; d + 8 <= n; d += 8) {
        _mm256_storeu_ps(values + d, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * d))));
      }
#endif
      for (; d < n; ++d) {
        uint16_t half;
        std::memcpy(&half, in + 2 * d, 2);
        values[d] = fp16_to_float(half);
      }
      return;
    }
    case RowCodec::kBf16:
      for (int64_t d = 0; d < n; ++d) {
        uint16_t half;
        std::memcpy(&half, in + 2 * d, 2);
        values[d] = bf16_to_float(half);
      }
      return;
    case RowCodec::kInt8: {
      float scale;
      std::memcpy(&scale, in, 4);
      for (int64_t d = 0; d < n; ++d) values[d] = scale * static_cast<float>(static_cast<int8_t>(in[4 + d]));
      return;
    }
  }
}

inline void encode_row(RowCodec codec, const float* row, int64_t dim, int64_t state_dim, uint8_t* out) {
  encode_values(codec, row, dim, out);
  encode_values(state_codec(codec), row + dim, state_dim, out + encoded_bytes(codec, dim));
}

inline void decode_row(RowCodec codec, const uint8_t* in, int64_t dim, int64_t state_dim, float* row) {
  decode_values(codec, in, dim, row);
  decode_values(state_codec(codec), in + encoded_bytes(codec, dim), state_dim, row + dim);
}

}  // namespace hetrec
