// `topk`: the k elements of largest magnitude, exactly, and their packed indices (`kernels.indices`).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "chunk.h"
#include "simd.h"

namespace topk {

constexpr int64_t kPage = 65536, kRow = 1024;
constexpr int64_t kCell = 64;        // elements that are skipped together if none reaches the threshold
constexpr int64_t kSamples = 1 << 13;

inline int64_t bitmap_bytes(int64_t n) {
  return n <= kRow ? 8 * ceil_div(n, 64) : kRow / 8 * ceil_div(n, kRow);
}

inline bool has_bitmap(int64_t n, int64_t k) {
  return bitmap_bytes(n) < 2 * k + (n > kPage ? 4 * ceil_div(n, kPage) : 0);
}

inline int64_t bytes(int64_t n, int64_t k) {
  return 4 * k + (has_bitmap(n, k) ? bitmap_bytes(n) : 2 * k + (n > kPage ? 4 * ceil_div(n, kPage) : 0));
}

// Writes x to `sums`, and the positions of elements whose magnitude, as an integer, is at least `least`.
// Returns the largest magnitude.
CLONED int32_t collect(const Source& source, int32_t least, float* sums, std::vector<int32_t>* found) {
  int32_t largest = 0;
  for (int64_t begin = 0; begin < source.size; begin += kCell) {
    const int64_t count = source.size - begin < kCell ? source.size - begin : kCell;
    float* x = sums + begin;
    int32_t of_cell = 0;
    if (count == kCell) {
      read(source, begin, kCell, x);
      for (int64_t j = 0; j < kCell; ++j) {
        const int32_t key = bits_of(x[j]) & kMagnitude;
        of_cell = key > of_cell ? key : of_cell;
      }
    } else {
      read(source, begin, count, x);
      for (int64_t j = 0; j < count; ++j) {
        const int32_t key = bits_of(x[j]) & kMagnitude;
        of_cell = key > of_cell ? key : of_cell;
      }
    }
    largest = of_cell > largest ? of_cell : largest;
    if (of_cell >= least)
      for (int64_t j = 0; j < count; ++j)
        if ((bits_of(x[j]) & kMagnitude) >= least) found->push_back(static_cast<int32_t>(begin + j));
  }
  return largest;
}

// A magnitude that probably a little more than k elements reach, from an evenly spaced sample.
inline int32_t estimate(const Source& source, int64_t k) {
  const int64_t n = source.size, stride = n / kSamples;
  if (stride < 2 || 4 * k > n) return 0;
  std::vector<int32_t> sample;
  sample.reserve(n / stride + 1);
  for (int64_t i = 0; i < n; i += stride) sample.push_back(bits_of(source.at(i)) & kMagnitude);
  const double share = static_cast<double>(k) / n * sample.size();
  const auto rank = std::min<int64_t>(sample.size(), std::ceil(share + 3.0 * std::sqrt(share) + 3.0));
  std::nth_element(sample.begin(), sample.begin() + rank - 1, sample.end(), std::greater<int32_t>());
  return sample[rank - 1];
}

// Encodes; `sums` [n] is the new residual, or memory for it.
inline bool encode(const Source& source, const Encoding& how, uint8_t* payload, float* sums) {
  const int64_t n = source.size, k = how.kept;
  std::vector<int32_t> found;
  found.reserve(2 * k);
  const int32_t guess = estimate(source, k);
  const int32_t largest = collect(source, guess, sums, &found);
  if (static_cast<int64_t>(found.size()) < k) {
    found.resize(n);
    for (int64_t i = 0; i < n; ++i) found[i] = static_cast<int32_t>(i);
  }
  std::vector<int32_t> keys(found.size());
  for (size_t i = 0; i < found.size(); ++i) keys[i] = bits_of(sums[found[i]]) & kMagnitude;
  std::nth_element(keys.begin(), keys.begin() + k - 1, keys.end(), std::greater<int32_t>());
  const int32_t least = keys[k - 1];
  // Of elements that equal the least one, the first are selected.
  int64_t equal = std::count(keys.begin(), keys.begin() + k, least);

  const bool bitmap = has_bitmap(n, k);
  uint8_t* packed = payload + 4 * k;
  std::memset(packed, 0, bytes(n, k) - 4 * k);
  uint8_t* low = n > kPage ? packed + 4 * ceil_div(n, kPage) : packed;
  const int64_t width = n <= kRow ? bitmap_bytes(n) : kRow / 8;  // bytes of a row of the bitmap
  int64_t at = 0;
  for (const int32_t i : found) {
    const int32_t key = bits_of(sums[i]) & kMagnitude;
    if (key < least || (key == least && equal-- <= 0)) continue;
    std::memcpy(payload + 4 * at, &sums[i], 4);
    if (bitmap) {
      // As `kernels.bitpack`: bits that share a byte are an eighth of a row apart.
      const int64_t column = i % (8 * width);
      packed[i / (8 * width) * width + column % width] |= static_cast<uint8_t>(1 << (column / width));
    } else {
      const uint16_t of_page = static_cast<uint16_t>(i % kPage);
      std::memcpy(low + 2 * at, &of_page, 2);
      if (n > kPage) {
        int32_t count;
        std::memcpy(&count, packed + 4 * (i / kPage), 4);
        ++count;
        std::memcpy(packed + 4 * (i / kPage), &count, 4);
      }
    }
    sums[i] = 0.0f;
    if (++at == k) break;
  }
  return largest < kInfinity;
}

// The indices of a payload, ascending; false if they are not k indices below n.
inline bool unpack(const uint8_t* packed, int64_t n, int64_t k, std::vector<int64_t>* indices) {
  indices->clear();
  if (has_bitmap(n, k)) {
    const int64_t width = n <= kRow ? bitmap_bytes(n) : kRow / 8, rows = bitmap_bytes(n) / width;
    for (int64_t row = 0; row < rows; ++row)
      for (int bit = 0; bit < 8; ++bit)
        for (int64_t j = 0; j < width; ++j)
          if ((packed[row * width + j] >> bit) & 1) {
            const int64_t i = row * 8 * width + bit * width + j;
            if (i >= n || static_cast<int64_t>(indices->size()) == k) return false;
            indices->push_back(i);
          }
    return static_cast<int64_t>(indices->size()) == k;
  }
  const int64_t pages = n > kPage ? ceil_div(n, kPage) : 1;
  const uint8_t* low = n > kPage ? packed + 4 * pages : packed;
  int64_t at = 0;
  for (int64_t page = 0; page < pages; ++page) {
    int32_t count = static_cast<int32_t>(k);
    if (n > kPage) std::memcpy(&count, packed + 4 * page, 4);
    if (count < 0 || count > k - at) return false;
    for (int32_t c = 0; c < count; ++c, ++at) {
      uint16_t of_page;
      std::memcpy(&of_page, low + 2 * at, 2);
      const int64_t i = page * kPage + of_page;
      if (i >= n) return false;
      indices->push_back(i);
    }
  }
  return at == k;
}

// Adds values * scale of one rank to `out`. Damaged indices are harmless if all values are zero; otherwise false.
inline bool decode(const uint8_t* payload, int64_t n, int64_t k, float scale, std::vector<int64_t>* indices, float* out) {
  const bool valid = unpack(payload + 4 * k, n, k, indices);
  for (int64_t j = 0; j < k; ++j) {
    float value;
    std::memcpy(&value, payload + 4 * j, 4);
    if (valid)
      out[(*indices)[j]] += value * scale;
    else if (value != 0.0f)
      return false;
  }
  return true;
}

}  // namespace topk
