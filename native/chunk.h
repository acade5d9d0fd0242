// Where the elements of a chunk come from, and where those of a decoded chunk go.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"

// The elements from `begin` to before `end` of a chunk's gradient.
struct Piece {
  const float* data;
  int64_t begin, end;
};

// gradient + decay * residual, float32 [size]. The residual may be null. The gradient lies in pieces, in their order:
// they are read where they are, so that nothing has to put them end to end before.
struct Source {
  std::vector<Piece> pieces;
  const float* residual;
  float decay;
  int64_t size;
  mutable size_t last = 0;  // the piece that was read last; each chunk is read by one thread

  // The piece with element i. Most calls ask for the piece of the call before, or for the next one.
  const Piece& piece_of(int64_t i) const {
    if (i >= pieces[last].begin && i < pieces[last].end) return pieces[last];
    const auto next = std::upper_bound(pieces.begin(), pieces.end(), i, [](int64_t i, const Piece& p) { return i < p.end; });
    last = next - pieces.begin();
    return *next;
  }

  // Copies the gradient's elements from several pieces.
  void gather(int64_t begin, int64_t count, float* out) const {
    while (count > 0) {
      const Piece& piece = piece_of(begin);
      const int64_t some = std::min(count, piece.end - begin);
      std::memcpy(out, piece.data + (begin - piece.begin), some * sizeof(float));
      begin += some, out += some, count -= some;
    }
  }

  float at(int64_t i) const {
    const Piece& piece = piece_of(i);
    const float gradient = piece.data[i - piece.begin];
    return residual == nullptr ? gradient : gradient + decay * residual[i];
  }
};

// Adds residuals to `count` elements of the gradient.
INLINE void add(const float* gradient, const float* residual, float decay, int64_t count, float* out) {
  if (decay == 1.0f) {
    for (int64_t j = 0; j < count; ++j) out[j] = gradient[j] + residual[j];
  } else {
    for (int64_t j = 0; j < count; ++j) out[j] = gradient[j] + decay * residual[j];
  }
}

// Writes the elements from `begin` on to `out` [count].
INLINE void read(const Source& source, int64_t begin, int64_t count, float* out) {
  if (count <= 0) return;
  const Piece& piece = source.piece_of(begin);
  const float* gradient = piece.data + (begin - piece.begin);
  if (begin + count > piece.end) {
    source.gather(begin, count, out);
    gradient = out;
  }
  if (source.residual != nullptr)
    add(gradient, source.residual + begin, source.decay, count, out);
  else if (gradient != out)
    std::memcpy(out, gradient, count * sizeof(float));
}

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
