// `int2`: linear quantization of blocks of 64 with 2 bits, as `compressors.int2` and `kernels.headers` describe it.
#pragma once

#include <cmath>
#include <cstring>

#include "chunk.h"
#include "quantize.h"
#include "simd.h"

namespace int2 {

constexpr int64_t kBlock = 64, kCodeBytes = kBlock / 4;
constexpr int kDropped = 17;  // bits of a step's mantissa
constexpr int32_t kNaN = 0x7FC00000;

inline int64_t bytes(int64_t n) { return ceil_div(n, kBlock) * (2 + kCodeBytes); }

INLINE float step_of(int32_t header) { return float_of((header >> 2) << kDropped); }
INLINE float base_of(int32_t header) { return -static_cast<float>(header & 3); }

// The step and the base of a block with these extremes, given as ordered integers.
INLINE int32_t header_of(int32_t low_key, int32_t high_key, bool finite) {
  if (!finite) return (kNaN >> kDropped) << 2;
  low_key = low_key < 0 ? low_key : 0;
  high_key = high_key > 0 ? high_key : 0;
  const quantize::Grid g = quantize::grid(low_key, high_key, 2, false);
  const int32_t kept = (bits_of(g.step) + (1 << (kDropped - 1))) >> kDropped;
  const float step = float_of(kept << kDropped);
  float base = step == 0.0f ? 0.0f : std::nearbyint(float_of(quantize::ordered(low_key)) / step);
  base = base < -3.0f ? -3.0f : base;
  return kept << 2 | static_cast<int32_t>(-base);
}

// Encodes x [64]; writes x - decoded in its place if `keep`. Returns whether all elements are finite.
INLINE bool encode_block(float* x, uint8_t* header_bytes, uint8_t* packed, bool keep) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int64_t j = 0; j < kBlock; ++j) {
    const int32_t key = quantize::ordered(bits_of(x[j]));
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  const bool finite = high < kInfinity && low > quantize::ordered(static_cast<int32_t>(0xFF800000u));
  const int32_t header = header_of(low, high, finite);
  const uint16_t header16 = static_cast<uint16_t>(header);
  std::memcpy(header_bytes, &header16, 2);
  const float step = step_of(header), inverse = step > 0.0f ? 1.0f / step : 0.0f;
  const float lowest = base_of(header) + quantize::kMagic, highest = lowest + 3.0f;
  const int32_t zero = bits_of(lowest);
  uint8_t codes[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) {
    float shifted = x[j] * inverse + quantize::kMagic;
    shifted = shifted < lowest ? lowest : shifted;
    shifted = shifted > highest ? highest : shifted;
    codes[j] = static_cast<uint8_t>(bits_of(shifted) - zero);
    if (keep) x[j] -= (shifted - quantize::kMagic) * step;
  }
  quantize::pack_field<2>(codes, kBlock, 0, packed);
  return finite;
}

CLONED bool encode(const Source& source, uint8_t* payload, float* residual) {
  const int64_t n = source.size, rows = ceil_div(n, kBlock);
  uint8_t* packed = payload + 2 * rows;
  bool finite = true;
  for (int64_t row = 0; row < rows; ++row) {
    float x[kBlock];
    const int64_t begin = row * kBlock, count = n - begin < kBlock ? n - begin : kBlock;
    if (count == kBlock) {
      read(source, begin, kBlock, x);
    } else {
      read(source, begin, count, x);
      for (int64_t j = count; j < kBlock; ++j) x[j] = 0.0f;
    }
    finite &= encode_block(x, payload + 2 * row, packed + row * kCodeBytes, residual != nullptr);
    if (residual) write_back(x, count, residual + begin);
  }
  return finite;
}

// The sum of the payloads of some ranks, in their order, times `scale`; added to `out` or written there.
CLONED void decode(const uint8_t* const* ranks, int count, int64_t n, float scale, bool add, float* out) {
  const int64_t rows = ceil_div(n, kBlock);
  for (int64_t row = 0; row < rows; ++row) {
    float total[kBlock];
    for (int rank = 0; rank < count; ++rank) {
      uint16_t header;
      std::memcpy(&header, ranks[rank] + 2 * row, 2);
      const float step = step_of(header), base = base_of(header);
      uint8_t codes[kBlock];
      quantize::unpack_field<2>(ranks[rank] + 2 * rows + row * kCodeBytes, kBlock, true, codes);
      for (int64_t j = 0; j < kBlock; ++j) {
        const float value = (static_cast<float>(codes[j]) + base) * step;
        total[j] = rank ? total[j] + value : value;
      }
    }
    const int64_t begin = row * kBlock, length = n - begin < kBlock ? n - begin : kBlock;
    if (add) {
      for (int64_t j = 0; j < length; ++j) out[begin + j] += total[j] * scale;
    } else {
      for (int64_t j = 0; j < length; ++j) out[begin + j] = total[j] * scale;
    }
  }
}

}  // namespace int2
