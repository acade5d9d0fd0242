// `quantize`: linear quantization of blocks of 256, as `kernels.linear` and `kernels.bitpack` describe it.
#pragma once

#include <cmath>
#include <cstring>

#include "chunk.h"
#include "simd.h"

namespace quantize {

constexpr int64_t kBlock = 256;
constexpr float kTiny = 0x1p-120f;
constexpr float kHuge = 0x1p126f;
constexpr float kResolution = 0x1p-22f;
constexpr float kMagic = 0x1.8p23f;
constexpr float kLargestFloat = 3.4028234663852886e38f;
constexpr uint32_t kGolden = 0x9E3779B9u;

INLINE uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

inline int32_t fold(int32_t seed, int32_t value) {
  return static_cast<int32_t>(mix(mix(static_cast<uint32_t>(seed) + kGolden) + static_cast<uint32_t>(value)));
}

inline int64_t header_bytes(int64_t n) { return 4 * ceil_div(n, block_size(n, kBlock)); }

inline int64_t bytes(int64_t n, int bits) {
  const int64_t block = block_size(n, kBlock), rows = ceil_div(n, block);
  return rows * (8 + block * bits / 8);
}

INLINE int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & kMagnitude); }

struct Grid {
  float step, base;
};

// The grid of a block with these extremes, given as ordered integers.
INLINE Grid grid(int32_t low_key, int32_t high_key, int bits, bool stochastic) {
  const float low = float_of(ordered(low_key)), high = float_of(ordered(high_key));
  const int levels = (1 << bits) - 1;
  const float intervals = static_cast<float>(stochastic && bits > 1 ? levels - 1 : levels);
  const float largest = high > -low ? high : -low;
  float step = high / intervals - low / intervals;
  const float least = largest * kResolution;
  if (!(step > least)) step = least;
  if ((step >= kHuge || largest + step > kLargestFloat) && largest <= kLargestFloat) step = 0.0f;
  if (!(high > low)) step = largest * 0.25f;
  if (!(step > kTiny)) step = 0.0f;
  const float start = step == 0.0f ? 0.0f : low / step;
  if (stochastic) return {step, bits > 1 ? std::floor(start) : start};
  return {step, std::nearbyint(start)};
}

// Packs the field of `Width` bits that begins at `shift` of each code.
template <int Width>
INLINE uint8_t* pack_field(const uint8_t* codes, int64_t block, int shift, uint8_t* out) {
  constexpr int kPerByte = 8 / Width;
  constexpr int kMask = (1 << Width) - 1;
  const int64_t step = block / kPerByte;
  for (int64_t j = 0; j < step; ++j) {
    int byte = 0;
    for (int i = 0; i < kPerByte; ++i) byte |= ((codes[i * step + j] >> shift) & kMask) << (i * Width);
    out[j] = static_cast<uint8_t>(byte);
  }
  return out + step;
}

// Adds the field of `Width` bits to codes, whose bits are shifted to make room for it; writes them if it is the first.
template <int Width>
INLINE void unpack_field(const uint8_t* packed, int64_t block, bool is_first, uint8_t* codes) {
  constexpr int kPerByte = 8 / Width;
  constexpr int kMask = (1 << Width) - 1;
  const int64_t step = block / kPerByte;
  for (int i = 0; i < kPerByte; ++i) {
    if (is_first) {
      for (int64_t j = 0; j < step; ++j) codes[i * step + j] = static_cast<uint8_t>((packed[j] >> (i * Width)) & kMask);
    } else {
      for (int64_t j = 0; j < step; ++j)
        codes[i * step + j] =
            static_cast<uint8_t>(((codes[i * step + j] << Width) & 0xFF) | ((packed[j] >> (i * Width)) & kMask));
    }
  }
}

// The parts of a payload: steps, bases, and one matrix of packed codes for each field of the width.
template <typename Byte>
struct Parts {
  Byte *step, *base, *codes[3];
  int64_t widths[3] = {0, 0, 0};
  int fields = 0;

  Parts(Byte* payload, int64_t rows, int64_t block, int bits) {
    step = payload;
    base = step + 4 * rows;
    Byte* next = base + 4 * rows;
    for (int width = 8; width; width /= 2)
      if (bits & width) {
        codes[fields] = next;
        widths[fields++] = width;
        next += rows * (block * width / 8);
      }
  }
};

// Quantizes x [block]; writes the codes of row `row`, and x - decoded in place of x if `keep`. `first` is the position of
// its first element, for the noise of stochastic rounding. Returns whether all elements are finite.
INLINE bool encode_block(float* x, int64_t block, int64_t row, int64_t first, const Encoding& how,
                         const Parts<uint8_t>& parts, bool keep) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int64_t j = 0; j < block; ++j) {
    const int32_t key = ordered(bits_of(x[j]));
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  const bool finite = high < kInfinity && low > ordered(static_cast<int32_t>(0xFF800000u));
  const Grid g = grid(low, high, how.bits, how.stochastic);
  std::memcpy(parts.step + 4 * row, &g.step, 4);
  std::memcpy(parts.base + 4 * row, &g.base, 4);

  const float largest = static_cast<float>((1 << how.bits) - 1);
  const float inverse = g.step > 0.0f ? 1.0f / g.step : 0.0f;
  uint8_t codes[kBlock];
  if (!how.stochastic) {
    const float lowest = g.base + kMagic, highest = lowest + largest;
    const int32_t zero = bits_of(lowest);
    for (int64_t j = 0; j < block; ++j) {
      float shifted = x[j] * inverse + kMagic;
      shifted = shifted < lowest ? lowest : shifted;
      shifted = shifted > highest ? highest : shifted;
      codes[j] = static_cast<uint8_t>(static_cast<uint32_t>(bits_of(shifted)) - static_cast<uint32_t>(zero));
      if (keep) x[j] -= (shifted - kMagic) * g.step;
    }
  } else {
    const uint32_t start = mix(static_cast<uint32_t>(how.seed) + kGolden);
    for (int64_t j = 0; j < block; ++j) {
      const uint32_t position = static_cast<uint32_t>(first + j);
      const float noise = static_cast<float>(static_cast<int32_t>(mix((position * kGolden) ^ start) >> 8)) * 0x1p-24f;
      float code = std::floor((x[j] * inverse - g.base) + noise * (1.0f - 0x1p-16f));
      code = code < 0.0f ? 0.0f : code;
      code = code > largest ? largest : code;
      codes[j] = static_cast<uint8_t>(bits_of(code + kMagic));
      if (keep) x[j] -= (code + g.base) * g.step;
    }
  }
  int shift = how.bits;
  for (int f = 0; f < parts.fields; ++f) {
    shift -= static_cast<int>(parts.widths[f]);
    uint8_t* out = parts.codes[f] + row * (block * parts.widths[f] / 8);
    switch (parts.widths[f]) {
      case 8: pack_field<8>(codes, block, shift, out); break;
      case 4: pack_field<4>(codes, block, shift, out); break;
      case 2: pack_field<2>(codes, block, shift, out); break;
      default: pack_field<1>(codes, block, shift, out);
    }
  }
  return finite;
}

// Adds the decoded values of row `row` to `total`, or writes them there.
INLINE void decode_block(const Parts<const uint8_t>& parts, int64_t row, int64_t block, bool add, float* total) {
  uint8_t codes[kBlock];
  float step, base;
  std::memcpy(&step, parts.step + 4 * row, 4);
  std::memcpy(&base, parts.base + 4 * row, 4);
  for (int f = 0; f < parts.fields; ++f) {
    const uint8_t* packed = parts.codes[f] + row * (block * parts.widths[f] / 8);
    switch (parts.widths[f]) {
      case 8: std::memcpy(codes, packed, block); break;
      case 4: unpack_field<4>(packed, block, f == 0, codes); break;
      case 2: unpack_field<2>(packed, block, f == 0, codes); break;
      default: unpack_field<1>(packed, block, f == 0, codes);
    }
  }
  if (add) {
    for (int64_t j = 0; j < block; ++j) total[j] += (static_cast<float>(codes[j]) + base) * step;
  } else {
    for (int64_t j = 0; j < block; ++j) total[j] = (static_cast<float>(codes[j]) + base) * step;
  }
}

template <bool Full>
INLINE bool encode_rows(const Source& source, const Encoding& how, uint8_t* payload, float* residual) {
  const int64_t n = source.size, block = Full ? kBlock : block_size(n, kBlock), rows = ceil_div(n, block);
  const Parts<uint8_t> parts(payload, rows, block, how.bits);
  bool finite = true;
  for (int64_t row = 0; row < rows; ++row) {
    float x[kBlock];
    const int64_t begin = row * block, count = n - begin < block ? n - begin : block;
    if (Full && count == kBlock) {
      read(source, begin, kBlock, x);
      finite &= encode_block(x, kBlock, row, begin, how, parts, residual != nullptr);
      if (residual) write_back(x, kBlock, residual + begin);
    } else {
      read(source, begin, count, x);
      for (int64_t j = count; j < block; ++j) x[j] = x[count - 1];
      finite &= encode_block(x, block, row, begin, how, parts, residual != nullptr);
      if (residual) write_back(x, count, residual + begin);
    }
  }
  return finite;
}

CLONED bool encode(const Source& source, const Encoding& how, uint8_t* payload, float* residual) {
  return source.size >= kBlock ? encode_rows<true>(source, how, payload, residual)
                               : encode_rows<false>(source, how, payload, residual);
}

template <bool Full>
INLINE void decode_rows(const uint8_t* const* ranks, int count, int64_t n, int bits, float scale, bool add, float* out) {
  const int64_t block = Full ? kBlock : block_size(n, kBlock), rows = ceil_div(n, block);
  for (int64_t row = 0; row < rows; ++row) {
    float total[kBlock];
    for (int rank = 0; rank < count; ++rank) {
      const Parts<const uint8_t> parts(ranks[rank], rows, block, bits);
      decode_block(parts, row, Full ? kBlock : block, rank > 0, total);
    }
    const int64_t begin = row * block, length = n - begin < block ? n - begin : block;
    if (add) {
      for (int64_t j = 0; j < length; ++j) out[begin + j] += total[j] * scale;
    } else {
      for (int64_t j = 0; j < length; ++j) out[begin + j] = total[j] * scale;
    }
  }
}

// The sum of the payloads of some ranks, in their order, times `scale`; added to `out` or written there.
CLONED void decode(const uint8_t* const* ranks, int count, int64_t n, int bits, float scale, bool add, float* out) {
  if (n >= kBlock)
    decode_rows<true>(ranks, count, n, bits, scale, add, out);
  else
    decode_rows<false>(ranks, count, n, bits, scale, add, out);
}

}  // namespace quantize
