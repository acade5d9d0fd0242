// `int2`: linear quantization of blocks of 64 with 2 bits, as `compressors.int2` and `kernels.headers` describe it.
#pragma once

#include <cmath>
#include <cstring>

#include "chunk.h"
#include "hadamard.h"
#include "quantize.h"
#include "simd.h"

namespace int2 {

using hadamard::Floats;
using hadamard::Ints;
using hadamard::kVectors;

constexpr int64_t kBlock = hadamard::kBlock, kCodeBytes = kBlock / 4;
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
  const float below = -float_of(quantize::ordered(low_key));
  return kept << 2 | ((below > 0.5f * step) + (below > 1.5f * step) + (below > 2.5f * step));
}

INLINE Ints select(Ints condition, Ints a, Ints b) { return (condition & a) | (~condition & b); }

// The header of a block. `finite` becomes false unless all elements are finite.
INLINE int32_t header_of(const Floats* x, bool* finite) {
  Ints lows = Ints{} + INT32_MAX, highs = Ints{} + INT32_MIN;
  for (int i = 0; i < kVectors; ++i) {
    const Ints bits = (Ints)x[i], keys = bits ^ ((bits >> 31) & kMagnitude);  // as quantize::ordered
    lows = select(keys < lows, keys, lows);
    highs = select(keys > highs, keys, highs);
  }
  int32_t low = lows[0], high = highs[0];
  for (int lane = 1; lane < hadamard::kLanes; ++lane) {
    low = lows[lane] < low ? lows[lane] : low;
    high = highs[lane] > high ? highs[lane] : high;
  }
  const bool is_finite = high < kInfinity && low > quantize::ordered(static_cast<int32_t>(0xFF800000u));
  *finite &= is_finite;
  return header_of(low, high, is_finite);
}

// Writes the codes of a block; with `keep`, `x` becomes its residual.
INLINE void encode_block(int32_t header, Floats* x, uint8_t* packed, bool keep) {
  const float step = step_of(header), inverse = step > 0.0f ? 1.0f / step : 0.0f;
  const float lowest = base_of(header) + quantize::kMagic, highest = lowest + 3.0f;
  const int32_t zero = bits_of(lowest);
  Ints codes[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    Floats shifted = x[i] * inverse + quantize::kMagic;
    shifted = (Floats)select(shifted < lowest, (Ints)(Floats{} + lowest), (Ints)shifted);
    shifted = (Floats)select(shifted > highest, (Ints)(Floats{} + highest), (Ints)shifted);
    codes[i] = ((Ints)shifted - zero) & 3;
    if (keep) x[i] = x[i] - (shifted - quantize::kMagic) * step;
  }
  hadamard::pack<kVectors>(codes, packed);
}

// Several blocks at a time: the processor computes their headers beside each other.
CLONED bool encode(const Source& source, uint8_t* payload, float* residual) {
  constexpr int64_t kGroup = 8;
  const int64_t n = source.size, rows = ceil_div(n, kBlock);
  uint8_t* packed = payload + 2 * rows;
  bool finite = true;
  for (int64_t row = 0; row < rows; row += kGroup) {
    Floats x[kGroup * kVectors];
    float* elements = reinterpret_cast<float*>(x);
    const int64_t begin = row * kBlock, group = rows - row < kGroup ? rows - row : kGroup;
    const int64_t count = n - begin < group * kBlock ? n - begin : group * kBlock;
    read(source, begin, count, elements);
    for (int64_t j = count; j < group * kBlock; ++j) elements[j] = 0.0f;
    uint16_t headers[kGroup];
    for (int64_t i = 0; i < group; ++i) headers[i] = static_cast<uint16_t>(header_of(x + i * kVectors, &finite));
    std::memcpy(payload + 2 * row, headers, 2 * group);
    for (int64_t i = 0; i < group; ++i)
      encode_block(headers[i], x + i * kVectors, packed + (row + i) * kCodeBytes, residual != nullptr);
    if (residual) write_back(elements, count, residual + begin);
  }
  return finite;
}

// The sum of the payloads of some ranks, in their order, times `scale`; added to `out` or written there.
CLONED void decode(const uint8_t* const* ranks, int count, int64_t n, float scale, bool add, float* out) {
  const int64_t rows = ceil_div(n, kBlock);
  for (int64_t row = 0; row < rows; ++row) {
    Floats total[kVectors];
    for (int rank = 0; rank < count; ++rank) {
      uint16_t header;
      std::memcpy(&header, ranks[rank] + 2 * row, 2);
      const float step = step_of(header), base = base_of(header);
      Ints codes[kVectors];
      hadamard::unpack<kVectors>(ranks[rank] + 2 * rows + row * kCodeBytes, codes);
      for (int i = 0; i < kVectors; ++i) {
        const Floats value = (__builtin_convertvector(codes[i] & 3, Floats) + base) * step;
        total[i] = rank ? total[i] + value : value;
      }
    }
    for (int i = 0; i < kVectors; ++i) total[i] = total[i] * scale;
    hadamard::write_block(total, row * kBlock, n, add, out);
  }
}

}  // namespace int2
