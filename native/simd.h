// How loops are compiled for several instruction sets, and small helpers that all formats share.
//
// A function marked CLONED is compiled for each instruction set; the best one is chosen when the library is loaded. The
// helpers are inlined into it, and vectorized with it. The compiler must not contract a * b + c into one rounding
// (-ffp-contract=off): all clones give the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// GCC knows these levels from version 12 on. With older ones the features are named: "arch=haswell" would mean Intel's
// processors only. With clang there is one version, for all processors.
#if !defined(__x86_64__) || !defined(__linux__) || defined(__clang__) || defined(HVD_COMPRESS_SANITIZED)
#define CLONED
#elif __GNUC__ >= 12
#define CLONED __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONED __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#define INLINE static inline __attribute__((always_inline))

constexpr int32_t kInfinity = 0x7F800000;
constexpr int32_t kMagnitude = 0x7FFFFFFF;  // all bits of a float but its sign

INLINE int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

INLINE float float_of(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Copies to memory that is not read again in this step, such as a new residual. On x86 it is written past the caches: it
// need not be read before, and what is needed soon stays there.
INLINE void write_back(const float* x, int64_t count, float* out) {
#if defined(__x86_64__)
  for (; count > 0 && reinterpret_cast<uintptr_t>(out) % 16 != 0; --count) *out++ = *x++;
  for (; count >= 4; count -= 4, x += 4, out += 4) _mm_stream_ps(out, _mm_loadu_ps(x));
#endif
  std::memcpy(out, x, count * sizeof(float));
}

// Other threads see what `write_back` wrote after this.
INLINE void finish_writes() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Treats subnormal floats as zero while it exists, as TensorFlow's threads and XLA do.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | (1ull << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}
#endif
};
