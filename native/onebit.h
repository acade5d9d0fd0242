// `onebit`: signs, and the mean magnitude of each block of 1024.
#pragma once

#include <cmath>
#include <cstring>

#include "chunk.h"
#include "simd.h"

namespace onebit {

constexpr int64_t kBlock = 1024;

inline int64_t bytes(int64_t n) {
  const int64_t block = block_size(n, kBlock), rows = ceil_div(n, block);
  return rows * (4 + block / 8);
}

// The sum of x [length], by halves, as `kernels.blocks.halving`; overwrites x.
INLINE float halving_sum(float* x, int64_t length) {
  while (length > 1) {
    const int64_t half = length / 2, odd = length % 2;
    for (int64_t j = 0; j < half; ++j) x[j] += x[half + j];
    if (odd) x[half] = x[2 * half];
    length = half + odd;
  }
  return x[0];
}

// The mean magnitude of the first `count` elements of a block.
INLINE float mean_magnitude(const float* x, int64_t count, int64_t block) {
  float magnitudes[kBlock];
  for (int64_t j = 0; j < block; ++j)
    magnitudes[j] = j < count ? float_of(bits_of(x[j]) & kMagnitude) * (1.0f / kBlock) : 0.0f;
  return halving_sum(magnitudes, block) / static_cast<float>(count) * static_cast<float>(kBlock);
}

INLINE void pack_signs(const float* x, int64_t block, uint8_t* signs) {
  const int64_t step = block / 8;
  for (int64_t j = 0; j < step; ++j) {
    int byte = 0;
    for (int i = 0; i < 8; ++i) byte |= (x[i * step + j] < 0.0f ? 1 : 0) << i;
    signs[j] = static_cast<uint8_t>(byte);
  }
}

INLINE void subtract_decoded(float* x, int64_t count, float mean) {
  for (int64_t j = 0; j < count; ++j) x[j] -= x[j] < 0.0f ? -mean : mean;
}

// Adds the decoded values of a block to `total`, or writes them there.
INLINE void decode_block(const uint8_t* mean_bytes, const uint8_t* signs, int64_t block, bool add, float* total) {
  const int64_t step = block / 8;
  float mean;
  std::memcpy(&mean, mean_bytes, 4);
  for (int i = 0; i < 8; ++i)
    for (int64_t j = 0; j < step; ++j) {
      const float value = (signs[j] >> i) & 1 ? -mean : mean;
      total[i * step + j] = add ? total[i * step + j] + value : value;
    }
}

template <bool Full>
INLINE bool encode_rows(const Source& source, uint8_t* payload, float* residual) {
  const int64_t n = source.size, block = Full ? kBlock : block_size(n, kBlock), rows = ceil_div(n, block);
  uint8_t *means = payload, *signs = payload + 4 * rows;
  bool finite = true;
  for (int64_t row = 0; row < rows; ++row) {
    float x[kBlock];
    const int64_t begin = row * block, count = n - begin < block ? n - begin : block;
    read(source, begin, count, x);
    for (int64_t j = count; j < block; ++j) x[j] = x[count - 1];
    const float mean = mean_magnitude(x, count, block);
    finite &= std::isfinite(mean);
    std::memcpy(means + 4 * row, &mean, 4);
    pack_signs(x, block, signs + row * (block / 8));
    if (residual) {
      subtract_decoded(x, count, mean);
      write_back(x, count, residual + begin);
    }
  }
  return finite;
}

CLONED bool encode(const Source& source, uint8_t* payload, float* residual) {
  return source.size >= kBlock ? encode_rows<true>(source, payload, residual)
                               : encode_rows<false>(source, payload, residual);
}

CLONED void decode(const uint8_t* const* ranks, int count, int64_t n, float scale, bool add, float* out) {
  const int64_t block = block_size(n, kBlock), rows = ceil_div(n, block);
  for (int64_t row = 0; row < rows; ++row) {
    float total[kBlock];
    for (int rank = 0; rank < count; ++rank)
      decode_block(ranks[rank] + 4 * row, ranks[rank] + 4 * rows + row * (block / 8), block, rank > 0, total);
    const int64_t begin = row * block, length = n - begin < block ? n - begin : block;
    if (add) {
      for (int64_t j = 0; j < length; ++j) out[begin + j] += total[j] * scale;
    } else {
      for (int64_t j = 0; j < length; ++j) out[begin + j] = total[j] * scale;
    }
  }
}

}  // namespace onebit
