// Rows of a table, each with its own number and its own blocks, as `compressors.rows` describes them.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "hadamard.h"
#include "onebit.h"
#include "quantize.h"
#include "simd.h"

namespace rows {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

enum Code { kSteps, kSigns, kRotated };  // of `quantize`, `onebit` and `hadamard`

// A row is divided into `blocks` blocks of `block` columns, a multiple of 8. The last one is padded.
struct Form {
  Code code;
  int bits;  // of `quantize`
  int64_t columns, blocks, block, number_bytes;

  int64_t scale_bytes() const { return code == kSteps ? 8 : code == kSigns ? 4 : 2; }
  int64_t bytes() const {
    return number_bytes + blocks * (scale_bytes() + block * (code == kSteps ? bits : code == kSigns ? 1 : 2) / 8);
  }

  // The columns of block `b` that are not padding.
  int64_t length(int64_t b) const { return std::min(block, columns - b * block); }

  bool is_valid() const {
    const bool has_size = code == kRotated ? block == hadamard::kBlock || block == hadamard::kSmallBlock
                                           : block <= (code == kSigns ? onebit::kBlock : quantize::kBlock);
    return columns >= 1 && blocks >= 1 && block >= 8 && block % 8 == 0 && number_bytes >= 1 && number_bytes <= 8 &&
           has_size && (blocks - 1) * block < columns && columns <= blocks * block &&
           (code == kSteps ? bits >= 1 && bits <= 8 : bits == 0);
  }
};

// Encodes the rows from `first` to before `last`. `values` and `residual` are [rows, columns]. A block that is not finite
// decodes to values that are not.
CLONED void encode(const Form& form, const Encoding& how, const int64_t* numbers, const float* values, int64_t first,
                   int64_t last, uint8_t* payload, float* residual) {
  hadamard::Floats vectors[onebit::kBlock / hadamard::kLanes];
  float* x = reinterpret_cast<float*>(vectors);
  for (int64_t row = first; row < last; ++row) {
    uint8_t* out = payload + row * form.bytes();
    for (int64_t i = 0; i < form.number_bytes; ++i)
      *out++ = static_cast<uint8_t>(static_cast<uint64_t>(numbers[row]) >> (8 * i));
    for (int64_t b = 0; b < form.blocks; ++b) {
      const int64_t begin = row * form.columns + b * form.block, count = form.length(b);
      std::memcpy(x, values + begin, count * sizeof(float));
      for (int64_t j = count; j < form.block; ++j) x[j] = form.code == kRotated ? 0.0f : x[count - 1];
      uint8_t *scale = out + form.scale_bytes() * b, *codes = out + form.scale_bytes() * form.blocks;
      if (form.code == kSigns) {
        const float mean = onebit::mean_magnitude(x, count, form.block);
        std::memcpy(scale, &mean, 4);
        onebit::pack_signs(x, form.block, codes + b * (form.block / 8));
        onebit::subtract_decoded(x, count, mean);
      } else if (form.code == kRotated) {
        codes += b * (form.block / 4);
        if (form.block == hadamard::kBlock)
          hadamard::encode_block<hadamard::kVectors>(vectors, scale, codes, true);
        else
          hadamard::encode_block<hadamard::kFewVectors>(vectors, scale, codes, true);
      } else {
        const quantize::Parts<uint8_t> parts{out, form.blocks, form.block, form.bits};
        if (!quantize::encode_block(x, form.block, b, (row * form.blocks + b) * form.block, how, parts, true))
          std::memcpy(parts.step + 4 * b, &kNaN, 4);
      }
      std::memcpy(residual + begin, x, count * sizeof(float));
    }
  }
}

// The inverse of `encode`.
CLONED void decode(const Form& form, const uint8_t* payload, int64_t first, int64_t last, int64_t* numbers,
                   float* values) {
  hadamard::Floats vectors[onebit::kBlock / hadamard::kLanes];
  float* x = reinterpret_cast<float*>(vectors);
  for (int64_t row = first; row < last; ++row) {
    const uint8_t* in = payload + row * form.bytes();
    uint64_t number = 0;
    for (int64_t i = 0; i < form.number_bytes; ++i) number |= static_cast<uint64_t>(*in++) << (8 * i);
    numbers[row] = static_cast<int64_t>(number);
    for (int64_t b = 0; b < form.blocks; ++b) {
      const uint8_t *scale = in + form.scale_bytes() * b, *codes = in + form.scale_bytes() * form.blocks;
      if (form.code == kSigns) {
        onebit::decode_block(scale, codes + b * (form.block / 8), form.block, false, x);
      } else if (form.code == kRotated) {
        codes += b * (form.block / 4);
        if (form.block == hadamard::kBlock)
          hadamard::decode_block<hadamard::kVectors>(scale, codes, vectors);
        else
          hadamard::decode_block<hadamard::kFewVectors>(scale, codes, vectors);
      } else {
        quantize::decode_block({in, form.blocks, form.block, form.bits}, b, form.block, false, x);
      }
      std::memcpy(values + row * form.columns + b * form.block, x, form.length(b) * sizeof(float));
    }
  }
}

}  // namespace rows
