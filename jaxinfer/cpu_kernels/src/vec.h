// Vectors of the instruction set that this is compiled for: 16, 8 or 4 floats, and what is computed
// with them. Compilers' vector extensions; only what they cannot say is in intrinsics, in tile.h.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxinfer {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint8_t vb __attribute__((vector_size(W)));

struct bf16 {
  uint16_t bits;
};

#define JI_INLINE inline __attribute__((always_inline))

// Of numbers; vectors are cast.
template <class To, class From>
JI_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

JI_INLINE vf splat(float x) { return x - vf{}; }
JI_INLINE vi splat(int32_t x) { return x - vi{}; }
JI_INLINE vu splat(uint32_t x) { return x - vu{}; }

JI_INLINE vi lane_index() {
  vi v{};
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}

// --- loading and storing ---

// Vectors that lie anywhere. GCC 12 would copy 64 bytes by memcpy through the stack.
typedef vf vf_anywhere __attribute__((aligned(4), may_alias));
typedef vu vu_anywhere __attribute__((aligned(4), may_alias));
typedef vh vh_anywhere __attribute__((aligned(2), may_alias));
typedef vb vb_anywhere __attribute__((aligned(1), may_alias));

JI_INLINE vf load(const float* p) { return *(const vf_anywhere*)p; }
JI_INLINE vf load(const bf16* p) {
#if defined(__AVX512F__)
  // GCC 12 makes two halves of it, which takes four instructions more.
  return (vf)((vu)_mm512_cvtepu16_epi32((__m256i) * (const vh_anywhere*)p) << 16);
#else
  return (vf)(__builtin_convertvector((vh) * (const vh_anywhere*)p, vu) << 16);
#endif
}
JI_INLINE vu load_words(const void* p) { return *(const vu_anywhere*)p; }
JI_INLINE void store(float* p, vf v) { *(vf_anywhere*)p = v; }
JI_INLINE void store_words(void* p, vu v) { *(vu_anywhere*)p = v; }
JI_INLINE void store_bytes(void* p, vb v) { *(vb_anywhere*)p = v; }

// The lowest byte of each lane.
JI_INLINE vb narrow_to_bytes(vi v) {
#if defined(__AVX512F__)
  // GCC 12 inserts them one by one.
  return (vb)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector((vu)v, vb);
#endif
}

// The upper half of each float, rounded to the nearest even; NaN stays NaN.
JI_INLINE vu to_bf16_bits(vf v) {
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? rounded : (bits >> 16) | 0x40;
}

JI_INLINE void store(bf16* p, vf v) {
#if defined(__AVX512F__)
  *(vh_anywhere*)p = (vh)_mm512_cvtepi32_epi16((__m512i)to_bf16_bits(v));
#else
  *(vh_anywhere*)p = __builtin_convertvector(to_bf16_bits(v), vh);
#endif
}

// The first n of W; the others are zero, and are neither read nor written.
template <class T>
JI_INLINE vf load_part(const T* p, int n) {
  if (n >= W) return load(p);
  T part[W] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}

template <class T>
JI_INLINE void store_part(T* p, vf v, int n) {
  if (n >= W) return store(p, v);
  T part[W];
  store(part, v);
  memcpy(p, part, n * sizeof(T));
}

// --- arithmetic ---

// Of two, the second where either is NaN.
JI_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
JI_INLINE vf absolute(vf v) { return (vf)((vu)v & 0x7fffffffu); }

template <int N, class T>
struct Lanes {
  typedef T vec __attribute__((vector_size(N * sizeof(T))));
};

// The upper half of a vector's lanes and the lower, each as a vector.
template <int N, class T>
struct Halves {
  typename Lanes<N / 2, T>::vec low, high;
};

// By memory, 64 bytes would be read back before they are all written: 20 cycles for each halving.
template <int N, class T>
JI_INLINE Halves<N, T> halves(typename Lanes<N, T>::vec v) {
  Halves<N, T> result;
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    result.low = (typename Lanes<8, T>::vec)_mm512_castsi512_si256((__m512i)v);
    result.high = (typename Lanes<8, T>::vec)_mm512_extracti64x4_epi64((__m512i)v, 1);
    return result;
  }
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) {
    result.low = (typename Lanes<4, T>::vec)_mm256_castsi256_si128((__m256i)v);
    result.high = (typename Lanes<4, T>::vec)_mm256_extracti128_si256((__m256i)v, 1);
    return result;
  }
#endif
  memcpy(&result, &v, sizeof v);
  return result;
}

// Adds up the lanes in halves: the same order each time.
template <class T, int N = W>
JI_INLINE T sum(typename Lanes<N, T>::vec v) {
  if constexpr (N == 4) {
    return (v[0] + v[2]) + (v[1] + v[3]);
  } else {
    Halves<N, T> h = halves<N, T>(v);
    return sum<T, N / 2>(h.low + h.high);
  }
}

template <int N = W>
JI_INLINE float largest(typename Lanes<N, float>::vec v) {
  if constexpr (N == 4) {
    float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
  } else {
    Halves<N, float> h = halves<N, float>(v);
    return largest<N / 2>(h.low > h.high ? h.low : h.high);
  }
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number

// e^x to 2 units in the last place; 0 below -87, where the result would be subnormal; NaN for NaN.
JI_INLINE vf exponential(vf x) {
  vf capped = x > 88.0f ? splat(88.0f) : x;
  capped = capped < -87.0f ? splat(-87.0f) : capped;
  vf shifted = capped * 1.44269504f + kRound;
  vf n = shifted - kRound;
  vf r = capped - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // The low bits of `shifted` hold n; moved to the exponent they scale by 2^n.
  vf result = (vf)((vi)p + ((vi)shifted << 23));
  result = x < -87.0f ? splat(0.0f) : result;
  return x > 88.0f ? splat(__builtin_inff()) : result;
}

JI_INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exponential(-x)); }
JI_INLINE vf hyperbolic_tangent(vf x) { return 1.0f - 2.0f / (1.0f + exponential(2.0f * x)); }

}  // namespace
}  // namespace jaxinfer
