// `hadamard`: 2 bits of rotated blocks of 64, as `compressors.hadamard`.
#pragma once

#include <cmath>
#include <cstring>

#include "chunk.h"
#include "simd.h"

namespace hadamard {

constexpr int64_t kBlock = 64;
constexpr float kLow = 0.4527800f, kHigh = 1.5104176f;
constexpr float kThreshold = static_cast<float>((0.4527800 + 1.5104176) / 2);
constexpr float kDeviation = 1.2533141373155003f;  // sqrt(pi / 2)

inline int64_t bytes(int64_t n) { return ceil_div(n, kBlock) * (2 + kBlock / 4); }

typedef float Floats __attribute__((vector_size(64)));

#if defined(__clang__)
#define LANES(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
typedef int32_t Lanes __attribute__((vector_size(64)));
#define LANES(v, ...) __builtin_shuffle(v, Lanes{__VA_ARGS__})
#endif

// factor^3 times the rotation of a block [64]: products with factor * (J / 2 - I), J the 4x4 matrix of ones, along each
// of its three axes of 4. The sums of four are the same in all of their lanes: each pair is added, then both pairs.
INLINE void rotate(float* x, float factor) {
  // Sums of quarters: nothing overflows unless a result does.
  const float twice = 2.0f * factor;
  Floats v[4];
  std::memcpy(v, x, sizeof(v));
  for (int i = 0; i < 4; ++i) {
    Floats sum = v[i] * 0.25f;
    sum = sum + LANES(sum, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    sum = sum + LANES(sum, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v[i] = (sum - v[i] * 0.5f) * twice;
    sum = v[i] * 0.25f;
    sum = sum + LANES(sum, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    sum = sum + LANES(sum, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v[i] = (sum - v[i] * 0.5f) * twice;
  }
  const Floats sum = (v[0] * 0.25f + v[1] * 0.25f) + (v[2] * 0.25f + v[3] * 0.25f);
  for (int i = 0; i < 4; ++i) v[i] = (sum - v[i] * 0.5f) * twice;
  std::memcpy(x, v, sizeof(v));
}

INLINE uint16_t to_bfloat16(float x) {
  const uint32_t bits = static_cast<uint32_t>(bits_of(x));
  if (std::isnan(x)) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

INLINE float from_bfloat16(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return float_of(static_cast<int32_t>(static_cast<uint32_t>(bits) << 16));
}

CLONED bool encode(const Source& source, uint8_t* payload, float* residual) {
  const int64_t n = source.size, rows = ceil_div(n, kBlock);
  uint8_t* codes = payload + 2 * rows;
  bool finite = true;
  for (int64_t row = 0; row < rows; ++row) {
    float x[kBlock], y[kBlock], magnitudes[kBlock];
    const int64_t begin = row * kBlock, count = n - begin < kBlock ? n - begin : kBlock;
    if (count == kBlock) {
      READ(source, begin, kBlock, x);
    } else {
      READ(source, begin, count, x);
      for (int64_t j = count; j < kBlock; ++j) x[j] = 0.0f;
    }
    std::memcpy(y, x, sizeof(x));
    rotate(y, 0.5f);  // an eighth of the rotation: nothing overflows
    for (int j = 0; j < kBlock; ++j) magnitudes[j] = float_of(bits_of(y[j]) & kMagnitude) * (1.0f / kBlock);
    for (int half = kBlock / 2; half; half /= 2)
      for (int j = 0; j < half; ++j) magnitudes[j] += magnitudes[half + j];
    const uint16_t scale_bits = to_bfloat16(magnitudes[0] * kDeviation);
    finite &= std::isfinite(magnitudes[0]);
    std::memcpy(payload + 2 * row, &scale_bits, 2);
    const float scale = from_bfloat16(payload + 2 * row);
    const float threshold = kThreshold * scale, low = kLow * scale, high = kHigh * scale;
    for (int j = 0; j < kBlock / 4; ++j) {
      int byte = 0;
      for (int i = 0; i < 4; ++i) {
        const float value = y[i * (kBlock / 4) + j];
        byte |= ((float_of(bits_of(value) & kMagnitude) > threshold ? 1 : 0) + (value < 0.0f ? 2 : 0)) << (2 * i);
      }
      codes[row * (kBlock / 4) + j] = static_cast<uint8_t>(byte);
    }
    if (residual) {
      for (int j = 0; j < kBlock; ++j) {
        const float level = float_of(bits_of(y[j]) & kMagnitude) > threshold ? high : low;
        y[j] = y[j] < 0.0f ? -level : level;
      }
      rotate(y, 2.0f);
      for (int64_t j = 0; j < count; ++j) residual[begin + j] = x[j] - y[j];
    }
  }
  return finite;
}

CLONED void decode(const uint8_t* const* ranks, int count, int64_t n, float scale, bool add, float* out) {
  const int64_t rows = ceil_div(n, kBlock);
  for (int64_t row = 0; row < rows; ++row) {
    float total[kBlock];
    for (int rank = 0; rank < count; ++rank) {
      const float factor = from_bfloat16(ranks[rank] + 2 * row);
      const uint8_t* codes = ranks[rank] + 2 * rows + row * (kBlock / 4);
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < kBlock / 4; ++j) {
          const int code = (codes[j] >> (2 * i)) & 3;
          const float level = (code & 1 ? kHigh : kLow) * factor;
          const float value = code & 2 ? -level : level;
          float* sum = total + i * (kBlock / 4) + j;
          *sum = rank ? *sum + value : value;
        }
    }
    for (int j = 0; j < kBlock; ++j) total[j] *= scale;
    rotate(total, 2.0f);
    const int64_t begin = row * kBlock, length = n - begin < kBlock ? n - begin : kBlock;
    if (add) {
      for (int64_t j = 0; j < length; ++j) out[begin + j] += total[j];
    } else {
      for (int64_t j = 0; j < length; ++j) out[begin + j] = total[j];
    }
  }
}

}  // namespace hadamard
