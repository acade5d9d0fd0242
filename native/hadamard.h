// `hadamard`: 2 bits of rotated blocks of 64 elements (of 16 for short rows), as `compressors.hadamard`.
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

constexpr int64_t kSmallBlock = 16;

inline int64_t bytes(int64_t n) { return ceil_div(n, kBlock) * (2 + kBlock / 4); }

// A block is eight of these, or two: elements 8 i to 8 i + 7 are in the i-th. AVX2 and AVX-512 have operations for them.
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(8)));
constexpr int kLanes = 8;
constexpr int kVectors = kBlock / kLanes, kFewVectors = kSmallBlock / kLanes;

#if defined(__clang__)
#define LANES(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define LANES(v, ...) __builtin_shuffle(v, Ints{__VA_ARGS__})
#endif

INLINE Floats magnitude(Floats x) { return (Floats)((Ints)x & kMagnitude); }

// factor^3 (factor^2) times the rotation of a block: products with factor * (J / 2 - I), J the 4x4 matrix of ones, along
// each of its three (two) axes of 4. The sums of four are the same in all of their lanes: each pair is added, then both
// pairs.
template <int Vectors>
INLINE void rotate(Floats* v, float factor) {
  // Sums of quarters: nothing overflows unless a result does.
  const float twice = 2.0f * factor;
  for (int i = 0; i < Vectors; ++i) {
    Floats sum = v[i] * 0.25f;
    sum = sum + LANES(sum, 1, 0, 3, 2, 5, 4, 7, 6);
    sum = sum + LANES(sum, 2, 3, 0, 1, 6, 7, 4, 5);
    v[i] = (sum - v[i] * 0.5f) * twice;
  }
  for (int i = 0; i < Vectors; i += 2) {
    Floats low = v[i] * 0.25f, high = v[i + 1] * 0.25f;
    low = low + LANES(low, 4, 5, 6, 7, 0, 1, 2, 3);
    high = high + LANES(high, 4, 5, 6, 7, 0, 1, 2, 3);
    const Floats sum = low + high;
    v[i] = (sum - v[i] * 0.5f) * twice;
    v[i + 1] = (sum - v[i + 1] * 0.5f) * twice;
  }
  if constexpr (Vectors == kVectors)
    for (int half = 0; half < 2; ++half) {
      Floats* x = v + half;
      const Floats sum = (x[0] * 0.25f + x[2] * 0.25f) + (x[4] * 0.25f + x[6] * 0.25f);
      for (int i = 0; i < kVectors; i += 2) x[i] = (sum - x[i] * 0.5f) * twice;
    }
}

// The mean magnitude of a block, summed by halves.
template <int Vectors>
INLINE float mean_magnitude(const Floats* v) {
  Floats sums[Vectors];
  for (int i = 0; i < Vectors; ++i) sums[i] = magnitude(v[i]) * (1.0f / (Vectors * kLanes));
  for (int half = Vectors / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[half + i];
  Floats sum = sums[0];
  sum = sum + LANES(sum, 4, 5, 6, 7, 0, 1, 2, 3);
  sum = sum + LANES(sum, 2, 3, 0, 1, 6, 7, 4, 5);
  sum = sum + LANES(sum, 1, 0, 3, 2, 5, 4, 7, 6);
  return sum[0];
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

// Which elements have the higher level; all bits of these are set.
INLINE Ints is_high(Floats x, float threshold) { return (Ints)(magnitude(x) > threshold); }

// The levels, with the signs in the highest bits of `signs`.
INLINE Floats level(Ints high_ones, Ints signs, float low, float high) {
  const Ints lows = (Ints)(Floats{} + low), highs = (Ints)(Floats{} + high);
  return (Floats)((high_ones & highs) | (~high_ones & lows) | (signs & ~kMagnitude));
}

// Element j of a quarter of a block is in byte j: the four quarters share its bits. Codes of two elements of a quarter
// of 16 are in vectors 2 apart, those of a quarter of 4 in the halves of a vector.
template <int Vectors>
INLINE void pack(const Ints* codes, uint8_t* out) {
  if constexpr (Vectors == kVectors) {
    for (int half = 0; half < 2; ++half) {
      Ints bytes = codes[half];
      for (int i = 1; i < 4; ++i) bytes |= codes[2 * i + half] << (2 * i);
      const Bytes packed = __builtin_convertvector(bytes, Bytes);
      std::memcpy(out + half * kLanes, &packed, kLanes);
    }
  } else {
    const Ints pairs = codes[0] | codes[1] << 4;
    const Bytes packed = __builtin_convertvector(pairs | LANES(pairs, 4, 5, 6, 7, 0, 1, 2, 3) << 2, Bytes);
    std::memcpy(out, &packed, kLanes / 2);
  }
}

// The inverse of `pack`. Higher bits of the results are to be ignored.
template <int Vectors>
INLINE void unpack(const uint8_t* in, Ints* codes) {
  if constexpr (Vectors == kVectors) {
    for (int half = 0; half < 2; ++half) {
      Bytes packed;
      std::memcpy(&packed, in + half * kLanes, kLanes);
      const Ints bytes = __builtin_convertvector(packed, Ints);
      for (int i = 0; i < 4; ++i) codes[2 * i + half] = bytes >> (2 * i);
    }
  } else {
    Bytes packed = {};
    std::memcpy(&packed, in, kLanes / 2);
    const Ints bytes = __builtin_convertvector(packed, Ints);
    const Ints pairs = LANES(bytes, 0, 1, 2, 3, 0, 1, 2, 3) >> Ints{0, 0, 0, 0, 2, 2, 2, 2};
    codes[0] = pairs, codes[1] = pairs >> 4;
  }
}

// Encodes a block; with `keep`, `x` becomes its residual. Returns whether it is finite.
template <int Vectors>
INLINE bool encode_block(Floats* x, uint8_t* scale_bytes, uint8_t* codes, bool keep) {
  Floats y[Vectors];
  for (int i = 0; i < Vectors; ++i) y[i] = x[i];
  rotate<Vectors>(y, 0.5f);  // an eighth (a quarter) of the rotation: nothing overflows
  const float mean = mean_magnitude<Vectors>(y);
  const uint16_t scale_bits = to_bfloat16(mean * kDeviation);
  std::memcpy(scale_bytes, &scale_bits, 2);
  const float scale = from_bfloat16(scale_bytes);
  const float threshold = kThreshold * scale, low = kLow * scale, high = kHigh * scale;
  Ints of_elements[Vectors];
  for (int i = 0; i < Vectors; ++i) of_elements[i] = (is_high(y[i], threshold) & 1) | ((Ints)(y[i] < 0.0f) & 2);
  pack<Vectors>(of_elements, codes);
  if (keep) {
    for (int i = 0; i < Vectors; ++i) y[i] = level(is_high(y[i], threshold), (Ints)(y[i] < 0.0f), low, high);
    rotate<Vectors>(y, 2.0f);
    for (int i = 0; i < Vectors; ++i) x[i] = x[i] - y[i];
  }
  return std::isfinite(mean);
}

// The rotated values of a block, divided by 8 (by 4).
template <int Vectors>
INLINE void levels(const uint8_t* scale_bytes, const uint8_t* codes, Floats* y) {
  const float scale = from_bfloat16(scale_bytes), low = kLow * scale, high = kHigh * scale;
  Ints of_elements[Vectors];
  unpack<Vectors>(codes, of_elements);
  for (int i = 0; i < Vectors; ++i) y[i] = level(-(of_elements[i] & 1), of_elements[i] << 30, low, high);
}

template <int Vectors>
INLINE void decode_block(const uint8_t* scale_bytes, const uint8_t* codes, Floats* x) {
  levels<Vectors>(scale_bytes, codes, x);
  rotate<Vectors>(x, 2.0f);
}

// Adds a block, whose first element is the one at `begin` of `n`, to `out` [n], or writes it there.
INLINE void write_block(const Floats* x, int64_t begin, int64_t n, bool add, float* out) {
  const int64_t length = n - begin < kBlock ? n - begin : kBlock;
  const float* elements = reinterpret_cast<const float*>(x);
  if (add) {
    for (int64_t j = 0; j < length; ++j) out[begin + j] += elements[j];
  } else {
    std::memcpy(out + begin, elements, length * sizeof(float));
  }
}

CLONED bool encode(const Source& source, uint8_t* payload, float* residual) {
  const int64_t n = source.size, rows = ceil_div(n, kBlock);
  uint8_t* codes = payload + 2 * rows;
  bool finite = true;
  for (int64_t row = 0; row < rows; ++row) {
    Floats x[kVectors];
    const int64_t begin = row * kBlock, count = n - begin < kBlock ? n - begin : kBlock;
    float* elements = reinterpret_cast<float*>(x);
    if (count == kBlock) {
      read(source, begin, kBlock, elements);
    } else {
      read(source, begin, count, elements);
      for (int64_t j = count; j < kBlock; ++j) elements[j] = 0.0f;
    }
    finite &= encode_block<kVectors>(x, payload + 2 * row, codes + row * (kBlock / 4), residual != nullptr);
    if (residual) write_back(elements, count, residual + begin);
  }
  return finite;
}

CLONED void decode(const uint8_t* const* ranks, int count, int64_t n, float scale, bool add, float* out) {
  const int64_t rows = ceil_div(n, kBlock);
  for (int64_t row = 0; row < rows; ++row) {
    Floats total[kVectors];
    for (int rank = 0; rank < count; ++rank) {
      Floats y[kVectors];
      levels<kVectors>(ranks[rank] + 2 * row, ranks[rank] + 2 * rows + row * (kBlock / 4), y);
      for (int i = 0; i < kVectors; ++i) total[i] = rank ? total[i] + y[i] : y[i];
    }
    for (int i = 0; i < kVectors; ++i) total[i] = total[i] * scale;
    rotate<kVectors>(total, 2.0f);
    write_block(total, row * kBlock, n, add, out);
  }
}

}  // namespace hadamard
