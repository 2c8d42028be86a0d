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

// Of each word, [low half · low half + high half · high half], the halves as int16.
#if defined(__AVX512BW__)
JI_INLINE vi add_pairs(vu a, vu b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
JI_INLINE vi add_pairs(vu a, vu b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#elif defined(__x86_64__)
JI_INLINE vi add_pairs(vu a, vu b) { return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b); }
#else
JI_INLINE vi add_pairs(vu a, vu b) {
  vi low = (((vi)a << 16) >> 16) * (((vi)b << 16) >> 16);
  return low + ((vi)a >> 16) * ((vi)b >> 16);
}
#endif

// Bytes 0 and 2 of a word of int8 as two int16.
JI_INLINE uint32_t signed_halves(uint32_t w) {
  return (uint16_t)(int8_t)w | (uint32_t)(uint16_t)(int8_t)(w >> 16) << 16;
}

template <Format F>
JI_INLINE Parts weight_parts(vu w) {
  if constexpr (F == Format::kInt8 && !kNativeInt8)
    return {w & 0x00ff00ffu, (w >> 8) & 0x00ff00ffu};
  if constexpr (F == Format::kBfloat16 && !kNativeBf16) return {w << 16, w & 0xffff0000u};
  return {w, w};
}

template <Format F>
JI_INLINE Parts row_parts(uint32_t w) {
  if constexpr (F == Format::kInt8 && !kNativeInt8)
    return {splat(signed_halves(w)), splat(signed_halves(w >> 8))};
  if constexpr (F == Format::kBfloat16 && !kNativeBf16)
    return {splat(w << 16), splat(w & 0xffff0000u)};
  return {splat(w), splat(w)};
}

JI_INLINE vi multiply_add_bytes(vi sums, Parts row, Parts weight) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weight.even, (__m512i)row.even);
#else
  return sums + add_pairs(row.even, weight.even) + add_pairs(row.odd, weight.odd);
#endif
}

template <Format F>
JI_INLINE vf multiply_add(vf sums, Parts row, Parts weight) {
  if constexpr (F == Format::kBfloat16) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)row.even, (__m512bh)weight.even);
#else
    sums += (vf)row.even * (vf)weight.even;
    return sums + (vf)row.odd * (vf)weight.odd;
#endif
  } else {
    return sums + (vf)row.even * (vf)weight.even;
  }
}

// Rows of a tile: as many as leave their sums in registers, of int8 both the block's and the row's.
template <Format F>
constexpr int kTileRows = F == Format::kInt8 ? (W == 16 ? 6 : 2) : (W == 16 ? 12 : 4);
constexpr int kColumns = 2;  // vectors of outputs at a time
constexpr int kAhead = 64;   // lines of a panel, 8 KB: what memory takes to answer

// A line of a panel is two of the cache's. Both are asked for: with one of them alone, the hardware's
// own prefetch loses its stride and the product takes a third longer than with none.
JI_INLINE void read_ahead(const uint32_t* line) {
  __builtin_prefetch(line + kAhead * kLanes);
  __builtin_prefetch(line + kAhead * kLanes + kLanes / 2);
}

template <Format F, int R>
JI_INLINE void sum_products(
    const uint32_t* rows, size_t stride, const uint32_t* line, int num_groups,
    vf sums[R][kColumns]) {
  for (int g = 0; g < num_groups; g++, line += kLanes) {
    read_ahead(line);
    Parts left = weight_parts<F>(load_words(line));
    Parts right = weight_parts<F>(load_words(line + W));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      Parts row = row_parts<F>(rows[r * stride + g]);
      sums[r][0] = multiply_add<F>(sums[r][0], row, left);
      sums[r][1] = multiply_add<F>(sums[r][1], row, right);
    }
  }
}

// Blocks are summed exactly, as integers, and added up as floats, each with its scale.
template <int R>
JI_INLINE void sum_blocks(
    const uint32_t* rows, size_t stride, const uint32_t* line, int num_groups,
    vf sums[R][kColumns]) {
  for (; num_groups > 0; num_groups -= kBlockGroups, rows += kBlockGroups + 2) {
    vi block[R][kColumns];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; c++) block[r][c] = splat((int32_t)rows[r * stride + 1]);
    int n = num_groups < kBlockGroups ? num_groups : kBlockGroups;
    for (int g = 0; g < n; g++, line += kLanes) {
      read_ahead(line);
      Parts left = weight_parts<Format::kInt8>(load_words(line));
      Parts right = weight_parts<Format::kInt8>(load_words(line + W));
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        Parts row = row_parts<Format::kInt8>(rows[r * stride + 2 + g]);
        block[r][0] = multiply_add_bytes(block[r][0], row, left);
        block[r][1] = multiply_add_bytes(block[r][1], row, right);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      vf scale = splat(bits_as<float>(rows[r * stride]));
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; c++)
        sums[r][c] += __builtin_convertvector(block[r][c], vf) * scale;
    }
  }
}

// out = R rows @ panel, [R][32].
template <Format F, int R>
void tile(
    const uint32_t* rows, size_t stride, const uint32_t* panel, int num_groups, float* out) {
  for (int lane = 0; lane < kLanes; lane += kColumns * W) {
    vf sums[R][kColumns] = {};
    if constexpr (F == Format::kInt8)
      sum_blocks<R>(rows, stride, panel + lane, num_groups, sums);
    else
      sum_products<F, R>(rows, stride, panel + lane, num_groups, sums);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; c++) store(out + r * kLanes + lane + c * W, sums[r][c]);
  }
}

typedef void (*Tile)(const uint32_t*, size_t, const uint32_t*, int, float*);

// The tile of so many rows, from 1 to the most.
template <Format F, int R = kTileRows<F>>
Tile tile_of(int num_rows) {
  if constexpr (R > 1)
    if (num_rows < R) return tile_of<F, R - 1>(num_rows);
  return tile<F, R>;
}

// How many rows to take next of those left, so that tiles are as equal as can be.
template <Format F>
JI_INLINE int next_rows(int left) {
  int tiles = (left + kTileRows<F> - 1) / kTileRows<F>;
  return (left + tiles - 1) / tiles;
}

}  // namespace
}  // namespace jaxinfer
