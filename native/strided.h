// `block_topk` and `hybrid`: the element of largest magnitude of each of k strided blocks, as `kernels.select`.
#pragma once

#include <cstring>
#include <vector>

#include "chunk.h"
#include "quantize.h"
#include "simd.h"

namespace strided {

// Columns that are searched together: their maxima stay in the second-level cache, and rows are read in long runs.
constexpr int64_t kTile = 16384;
constexpr int64_t kRead = 1024;  // elements that are read at once

inline int row_bytes(int64_t rows) { return rows <= 256 ? 1 : rows <= 65536 ? 2 : 4; }

// `bits` is 0 for values in float32.
inline int64_t bytes(int64_t n, int64_t k, int bits) {
  return k * row_bytes(ceil_div(n, k)) + (bits ? quantize::bytes(k, bits) : 4 * k);
}

template <typename Row>
INLINE void write_rows(const int32_t* selected, int64_t k, uint8_t* out) {
  for (int64_t j = 0; j < k; ++j) {
    const Row row = static_cast<Row>(selected[j]);
    std::memcpy(out + j * sizeof(Row), &row, sizeof(Row));
  }
}

CLONED void write_rows(const int32_t* selected, int64_t k, int size, uint8_t* out) {
  if (size == 1)
    write_rows<uint8_t>(selected, k, out);
  else if (size == 2)
    write_rows<uint16_t>(selected, k, out);
  else
    write_rows<int32_t>(selected, k, out);
}

// Finds the largest elements: their rows and values [k]. Writes gradient + residual to `residual` if it is not null.
CLONED bool select(const Source& source, int64_t k, int32_t* selected, float* values, float* residual) {
  const int64_t n = source.size, rows = ceil_div(n, k);
  int64_t mask = 1;
  while (mask < rows - 1) mask = 2 * mask + 1;
  const int32_t row_mask = static_cast<int32_t>(mask), of_magnitude = kMagnitude & ~row_mask;
  bool finite = true;
  int32_t largest[kTile];
  float of_largest[kTile];
  for (int64_t first = 0; first < k; first += kTile) {
    const int64_t columns = k - first < kTile ? k - first : kTile;
    for (int64_t j = 0; j < columns; ++j) largest[j] = INT32_MIN;
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t code = row_mask - static_cast<int32_t>(row);
      const int64_t last = row * k + first + columns < n ? columns : n - row * k - first;
      for (int64_t column = 0; column < last; column += kRead) {
        const int64_t begin = row * k + first + column, count = last - column < kRead ? last - column : kRead;
        float x[kRead];
        read(source, begin, count, x);
        for (int64_t j = 0; j < count; ++j) {
          const int32_t key = (bits_of(x[j]) & of_magnitude) | code;
          const bool is_larger = key > largest[column + j];
          largest[column + j] = is_larger ? key : largest[column + j];
          of_largest[column + j] = is_larger ? x[j] : of_largest[column + j];
        }
        if (residual) write_back(x, count, residual + begin);
      }
    }
    for (int64_t j = 0; j < columns; ++j) {
      finite &= largest[j] < kInfinity;
      selected[first + j] = row_mask - (largest[j] & row_mask);
      values[first + j] = of_largest[j];
    }
  }
  return finite;
}

inline bool encode(const Source& source, const Encoding& how, uint8_t* payload, float* residual) {
  const int64_t k = how.kept, rows = ceil_div(source.size, k);
  std::vector<int32_t> selected(k);
  std::vector<float> values(k);
  const bool finite = select(source, k, selected.data(), values.data(), residual);
  const int size = row_bytes(rows);
  uint8_t* positions = how.bits ? payload : payload + 4 * k;
  write_rows(selected.data(), k, size, positions);
  if (how.bits == 0) {
    std::memcpy(payload, values.data(), 4 * k);
    if (residual)
      for (int64_t j = 0; j < k; ++j) residual[selected[j] * k + j] = values[j] - values[j];
    return finite;
  }
  std::vector<float> lost(residual ? k : 0);
  const Source of_values{{{values.data(), 0, k}}, nullptr, 1.0f, k};
  quantize::encode(of_values, how, payload + k * size, residual ? lost.data() : nullptr);
  if (residual)
    for (int64_t j = 0; j < k; ++j) residual[selected[j] * k + j] = values[j] - (values[j] - lost[j]);
  return finite;
}

// Adds values * scale [k] to `out`, one in each block. Returns whether all rows are valid: if one is not, nothing is
// written for it.
template <typename Row>
inline bool scatter(const uint8_t* rows, const float* values, int64_t n, int64_t k, float scale, float* out) {
  const int64_t depth = ceil_div(n, k), full = n - (depth - 1) * k;
  bool valid = true;
  for (int64_t j = 0; j < k; ++j) {
    Row row;
    std::memcpy(&row, rows + j * sizeof(Row), sizeof(Row));
    if (row < 0 || row >= (j < full ? depth : depth - 1))
      valid = false;
    else
      out[row * k + j] += values[j] * scale;
  }
  return valid;
}

// Adds the payload of one rank, times `scale`, to `out` [n]; returns whether all of its rows are valid.
inline bool decode(const uint8_t* payload, int64_t n, int64_t k, int bits, float scale, float* out) {
  const int size = row_bytes(ceil_div(n, k));
  const uint8_t* rows = bits ? payload : payload + 4 * k;
  std::vector<float> values(k);
  if (bits) {
    const uint8_t* codes = payload + k * size;
    quantize::decode(&codes, 1, k, bits, 1.0f, false, values.data());
  } else {
    std::memcpy(values.data(), payload, 4 * k);
  }
  if (size == 1) return scatter<uint8_t>(rows, values.data(), n, k, scale, out);
  if (size == 2) return scatter<uint16_t>(rows, values.data(), n, k, scale, out);
  return scatter<int32_t>(rows, values.data(), n, k, scale, out);
}

}  // namespace strided
