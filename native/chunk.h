// Where the elements of a chunk come from, and where those of a decoded chunk go.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

// gradient + decay * residual, float32 [size]. The residual may be null.
struct Source {
  const float* gradient;
  const float* residual;
  float decay;
  int64_t size;

  INLINE void add(const float* g, const float* r, float decay, int64_t count, float* out) {
    if (r == nullptr) {
      std::memcpy(out, g, count * sizeof(float));
    } else if (decay == 1.0f) {
      for (int64_t j = 0; j < count; ++j) out[j] = g[j] + r[j];
    } else {
      for (int64_t j = 0; j < count; ++j) out[j] = g[j] + decay * r[j];
    }
  }

  float at(int64_t i) const { return residual == nullptr ? gradient[i] : gradient[i] + decay * residual[i]; }
};

#define READ(source, begin, count, out)                                                                  \
  Source::add((source).gradient + (begin), (source).residual ? (source).residual + (begin) : nullptr,    \
              (source).decay, (count), (out))

// What encoding takes besides the elements.
struct Encoding {
  int bits;          // of `quantize` and `hybrid`
  bool stochastic;   // rounding
  int32_t seed;      // of stochastic rounding
  int64_t kept;      // elements, of sparse formats
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// As `formats.sizes.block_shape`: the size of blocks of at most `largest` elements.
inline int64_t block_size(int64_t n, int64_t largest) {
  const int64_t rounded = 8 * ceil_div(n < 1 ? 1 : n, 8);
  return rounded < largest ? rounded : largest;
}
