// `fp16` and `bf16`: values rounded to 16 bits, to nearest even.
#pragma once

#include <cmath>
#include <cstring>

#include "chunk.h"
#include "hadamard.h"
#include "simd.h"

namespace cast16 {

// IEEE 754 half precision without branches on most values: the float adder rounds.
INLINE uint16_t to_half(float x) {
  const uint32_t bits = static_cast<uint32_t>(bits_of(x)), sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Subnormal halves: adding 0.5 leaves the rounded value in the lowest bits.
  const uint32_t subnormal = static_cast<uint32_t>(bits_of(float_of(static_cast<int32_t>(magnitude)) + 0.5f)) - 0x3F000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477FF000u ? 0x7C00u : half;  // 65520 and more round to infinity
  half = magnitude > 0x7F800000u ? 0x7E00u : half;
  return static_cast<uint16_t>(sign | half);
}

INLINE float from_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
  const uint32_t normal = (magnitude << 13) + 0x38000000u;
  // Exact: a subnormal half is an integer times 2^-24.
  const uint32_t subnormal = static_cast<uint32_t>(bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f));
  uint32_t bits = magnitude < 0x400u ? subnormal : normal;
  bits = magnitude >= 0x7C00u ? ((magnitude << 13) | 0x7F800000u) : bits;
  return float_of(static_cast<int32_t>(sign | bits));
}

INLINE uint16_t to_brain(float x) { return hadamard::to_bfloat16(x); }

INLINE float from_brain(uint16_t bits) { return float_of(static_cast<int32_t>(static_cast<uint32_t>(bits) << 16)); }

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 12)
// The processor's own conversions, eight at a time; the same results.
__attribute__((target("avx,f16c"))) inline int64_t to_halves(const float* x, int64_t count, uint16_t* out) {
  int64_t j = 0;
  for (; j + 8 <= count; j += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j), _mm256_cvtps_ph(_mm256_loadu_ps(x + j), 0));
  return j;
}

__attribute__((target("avx,f16c"))) inline int64_t from_halves(const uint16_t* x, int64_t count, float* out) {
  int64_t j = 0;
  for (; j + 8 <= count; j += 8)
    _mm256_storeu_ps(out + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + j))));
  return j;
}

inline bool has_f16c() {
  static const bool has = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return has;
}
#else
inline int64_t to_halves(const float*, int64_t, uint16_t*) { return 0; }
inline int64_t from_halves(const uint16_t*, int64_t, float*) { return 0; }
inline bool has_f16c() { return false; }
#endif

template <bool Half>
INLINE bool encode_values(const Source& source, uint8_t* payload, float* residual) {
  constexpr int64_t kTile = 256;
  int32_t largest = 0;
  for (int64_t begin = 0; begin < source.size; begin += kTile) {
    const int64_t count = source.size - begin < kTile ? source.size - begin : kTile;
    float x[kTile];
    uint16_t codes[kTile];
    read(source, begin, count, x);
    for (int64_t j = 0; j < count; ++j) {
      const int32_t key = bits_of(x[j]) & kMagnitude;
      largest = key > largest ? key : largest;
    }
    for (int64_t j = Half && has_f16c() ? to_halves(x, count, codes) : 0; j < count; ++j)
      codes[j] = Half ? to_half(x[j]) : to_brain(x[j]);
    std::memcpy(payload + 2 * begin, codes, 2 * count);
    if (residual) {
      for (int64_t j = 0; j < count; ++j) x[j] -= Half ? from_half(codes[j]) : from_brain(codes[j]);
      write_back(x, count, residual + begin);
    }
  }
  return largest < kInfinity;
}

CLONED bool encode(const Source& source, bool half, uint8_t* payload, float* residual) {
  return half ? encode_values<true>(source, payload, residual) : encode_values<false>(source, payload, residual);
}

template <bool Half>
INLINE void decode_values(const uint8_t* const* ranks, int count, int64_t n, float scale, bool add, float* out) {
  constexpr int64_t kTile = 256;
  for (int64_t begin = 0; begin < n; begin += kTile) {
    const int64_t length = n - begin < kTile ? n - begin : kTile;
    float total[kTile];
    for (int rank = 0; rank < count; ++rank) {
      uint16_t codes[kTile];
      float values[kTile];
      std::memcpy(codes, ranks[rank] + 2 * begin, 2 * length);
      for (int64_t j = Half && has_f16c() ? from_halves(codes, length, values) : 0; j < length; ++j)
        values[j] = Half ? from_half(codes[j]) : from_brain(codes[j]);
      for (int64_t j = 0; j < length; ++j) total[j] = rank ? total[j] + values[j] : values[j];
    }
    for (int64_t j = 0; j < length; ++j) out[begin + j] = add ? out[begin + j] + total[j] * scale : total[j] * scale;
  }
}

CLONED void decode(const uint8_t* const* ranks, int count, int64_t n, bool half, float scale, bool add, float* out) {
  if (half)
    decode_values<true>(ranks, count, n, scale, add, out);
  else
    decode_values<false>(ranks, count, n, scale, add, out);
}

}  // namespace cast16
