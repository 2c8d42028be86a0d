// The product that everything is made of: R rows of words times one panel of 32 outputs.
//
// A word holds 4 bytes of the contraction (4 int8, 2 bfloat16, 1 float32). One row's word is
// broadcast and multiplied with the words of W outputs at once, so no sum ever crosses lanes, and
// each output adds its products in the same order however many rows there are: a row's result does
// not depend on its neighbours.
#pragma once

#include "jobs.h"
#include "vec.h"

namespace jaxinfer {
namespace {

// Sums of products: int32 for int8, else float.
template <Format F>
struct Sums {
  typedef vf vec;
  typedef float number;
};
template <>
struct Sums<Format::kInt8> {
  typedef vi vec;
  typedef int32_t number;
};

// Words, taken apart as far as the multiplication needs: done once for all rows of a tile.
struct Parts {
  vu even, odd;
};

#if defined(__AVX512VNNI__)
constexpr bool kNativeInt8 = true;
#else
constexpr bool kNativeInt8 = false;
#endif
#if defined(__AVX512BF16__)
constexpr bool kNativeBf16 = true;
#else
constexpr bool kNativeBf16 = false;
#endif

#if defined(__AVX512BW__)
JI_INLINE vu low_bytes(vu w) {
  return (vu)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)w, 8), 8);
}
JI_INLINE vu high_bytes(vu w) { return (vu)_mm512_srai_epi16((__m512i)w, 8); }
JI_INLINE vi add_pairs(vu a, vu b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
JI_INLINE vu low_bytes(vu w) {
  return (vu)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8);
}
JI_INLINE vu high_bytes(vu w) { return (vu)_mm256_srai_epi16((__m256i)w, 8); }
JI_INLINE vi add_pairs(vu a, vu b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#elif defined(__x86_64__)
JI_INLINE vu low_bytes(vu w) { return (vu)_mm_srai_epi16(_mm_slli_epi16((__m128i)w, 8), 8); }
JI_INLINE vu high_bytes(vu w) { return (vu)_mm_srai_epi16((__m128i)w, 8); }
JI_INLINE vi add_pairs(vu a, vu b) { return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b); }
#else
// Halves of 16 bits, each a signed number.
JI_INLINE vu low_bytes(vu w) {
  vi low = ((vi)w << 24) >> 24, high = ((vi)w << 8) >> 24;
  return ((vu)low & 0xffffu) | ((vu)high << 16);
}
JI_INLINE vu high_bytes(vu w) {
  vi low = ((vi)w << 16) >> 24, high = (vi)w >> 24;
  return ((vu)low & 0xffffu) | ((vu)high << 16);
}
JI_INLINE vi add_pairs(vu a, vu b) {
  vi low = (((vi)a << 16) >> 16) * (((vi)b << 16) >> 16);
  return low + ((vi)a >> 16) * ((vi)b >> 16);
}
#endif

template <Format F>
JI_INLINE Parts weight_parts(vu w) {
  if constexpr (F == Format::kInt8 && !kNativeInt8) return {low_bytes(w), high_bytes(w)};
  if constexpr (F == Format::kBfloat16 && !kNativeBf16) return {w << 16, w & 0xffff0000u};
  return {w, w};
}

template <Format F>
JI_INLINE Parts row_parts(uint32_t w) {
  // Rows of int8 are unsigned: 128 more than they mean.
  if constexpr (F == Format::kInt8 && !kNativeInt8)
    return {splat(w & 0x00ff00ffu), splat((w >> 8) & 0x00ff00ffu)};
  if constexpr (F == Format::kBfloat16 && !kNativeBf16)
    return {splat(w << 16), splat(w & 0xffff0000u)};
  return {splat(w), splat(w)};
}

template <Format F>
JI_INLINE typename Sums<F>::vec multiply_add(typename Sums<F>::vec sums, Parts row, Parts weight) {
  if constexpr (F == Format::kInt8) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)row.even, (__m512i)weight.even);
#else
    return sums + add_pairs(row.even, weight.even) + add_pairs(row.odd, weight.odd);
#endif
  } else if constexpr (F == Format::kBfloat16) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)row.even, (__m512bh)weight.even);
#else
    sums += bits_as<vf>(row.even) * bits_as<vf>(weight.even);
    return sums + bits_as<vf>(row.odd) * bits_as<vf>(weight.odd);
#endif
  } else {
    return sums + bits_as<vf>(row.even) * bits_as<vf>(weight.even);
  }
}

// Rows of a tile: as many as leave their sums in registers.
constexpr int kTileRows = W == 16 ? 12 : 4;
constexpr int kColumns = 2;  // vectors of outputs at a time

template <Format F, int R>
void tile(const uint32_t* rows, size_t stride, const uint32_t* panel, int num_groups, void* out) {
  typedef typename Sums<F>::vec Vec;
  for (int lane = 0; lane < kLanes; lane += kColumns * W) {
    Vec sums[R][kColumns] = {};
    const uint32_t* line = panel + lane;
    for (int g = 0; g < num_groups; g++, line += kLanes) {
      Parts weights[kColumns];
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; c++) weights[c] = weight_parts<F>(load_words(line + c * W));
      // A panel is read once, front to back; 4 KB ahead is beyond the page where the hardware's own
      // prefetch stops.
      if constexpr (R <= 4) __builtin_prefetch(line + 32 * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        Parts row = row_parts<F>(rows[r * stride + g]);
#pragma GCC unroll 2
        for (int c = 0; c < kColumns; c++) sums[r][c] = multiply_add<F>(sums[r][c], row, weights[c]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; c++)
        memcpy((uint32_t*)out + r * kLanes + lane + c * W, &sums[r][c], sizeof(Vec));
  }
}

typedef void (*Tile)(const uint32_t*, size_t, const uint32_t*, int, void*);

template <Format F>
Tile tile_of(int num_rows) {
  static const Tile tiles[] = {
      tile<F, 1>, tile<F, 2>, tile<F, 3>, tile<F, 4>,
#if defined(__AVX512F__)
      tile<F, 5>, tile<F, 6>, tile<F, 7>, tile<F, 8>, tile<F, 9>, tile<F, 10>, tile<F, 11>,
      tile<F, 12>,
#endif
  };
  return tiles[num_rows - 1];
}

// How many rows to take next of those left, so that tiles are as equal as can be.
JI_INLINE int next_rows(int left) {
  int tiles = (left + kTileRows - 1) / kTileRows;
  return (left + tiles - 1) / tiles;
}

}  // namespace
}  // namespace jaxinfer
