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

template <bool Full>
INLINE bool encode_rows(const Source& source, uint8_t* payload, float* residual) {
  const int64_t n = source.size, block = Full ? kBlock : block_size(n, kBlock), rows = ceil_div(n, block);
  uint8_t *means = payload, *signs = payload + 4 * rows;
  bool finite = true;
  for (int64_t row = 0; row < rows; ++row) {
    float x[kBlock], magnitudes[kBlock];
    const int64_t begin = row * block, count = n - begin < block ? n - begin : block;
    read(source, begin, count, x);
    for (int64_t j = count; j < block; ++j) x[j] = x[count - 1];
    for (int64_t j = 0; j < block; ++j)
      magnitudes[j] = j < count ? float_of(bits_of(x[j]) & kMagnitude) * (1.0f / kBlock) : 0.0f;
    const float mean = halving_sum(magnitudes, block) / static_cast<float>(count) * static_cast<float>(kBlock);
    finite &= std::isfinite(mean);
    std::memcpy(means + 4 * row, &mean, 4);
    const int64_t step = block / 8;
    for (int64_t j = 0; j < step; ++j) {
      int byte = 0;
      for (int i = 0; i < 8; ++i) byte |= (x[i * step + j] < 0.0f ? 1 : 0) << i;
      signs[row * step + j] = static_cast<uint8_t>(byte);
    }
    if (residual) {
      for (int64_t j = 0; j < count; ++j) x[j] -= x[j] < 0.0f ? -mean : mean;
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
  const int64_t block = block_size(n, kBlock), rows = ceil_div(n, block), step = block / 8;
  for (int64_t row = 0; row < rows; ++row) {
    float total[kBlock];
    for (int rank = 0; rank < count; ++rank) {
      float mean;
      std::memcpy(&mean, ranks[rank] + 4 * row, 4);
      const uint8_t* signs = ranks[rank] + 4 * rows + row * step;
      for (int i = 0; i < 8; ++i)
        for (int64_t j = 0; j < step; ++j) {
          const float value = (signs[j] >> i) & 1 ? -mean : mean;
          total[i * step + j] = rank ? total[i * step + j] + value : value;
        }
    }
    const int64_t begin = row * block, length = n - begin < block ? n - begin : block;
    if (add) {
      for (int64_t j = 0; j < length; ++j) out[begin + j] += total[j] * scale;
    } else {
      for (int64_t j = 0; j < length; ++j) out[begin + j] = total[j] * scale;
    }
  }
}

}  // namespace onebit
