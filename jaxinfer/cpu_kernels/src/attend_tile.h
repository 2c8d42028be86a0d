// Attention of many new tokens of one row: FlashAttention (arXiv:2205.14135, algorithm 1) with both
// products made of `tile`, on keys and values that are packed into panels block by block.
#pragma once

#include "attend_row.h"

namespace jaxinfer {
namespace {

// Both products in bfloat16 where pages and hardware are, else in float32.
template <class P>
constexpr Format kFormat = Format::kFloat32;
template <>
constexpr Format kFormat<bf16> = kNativeBf16 ? Format::kBfloat16 : Format::kFloat32;

constexpr int kPanelsOfKeys = kBlockKeys / kLanes;

template <Format F>
constexpr int kPerWord = F == Format::kBfloat16 ? 2 : 1;

template <Format F>
JI_INLINE void to_words(const float* x, int n, uint32_t* out, int num_words) {
  if constexpr (F == Format::kBfloat16)
    to_bf16(x, n, (bf16*)out, num_words * 2);
  else
    memcpy(out, x, n * sizeof(float));
}

// Word `i` of a page's head; a zero half behind an odd end.
template <Format F, class P>
JI_INLINE uint32_t word_of(const P* x, int i, int H) {
  if constexpr (F == Format::kBfloat16) {
    uint32_t low = x[2 * i].bits, high = 2 * i + 1 < H ? x[2 * i + 1].bits : 0;
    return low | high << 16;
  } else if constexpr (sizeof(P) == 2) {
    return (uint32_t)x[i].bits << 16;
  } else {
    return bits_as<uint32_t>(x[i]);
  }
}

// Keys [start, start + n) as the panels of a product over the head: [panel][word of head][32 keys].
template <Format F, class P>
void pack_keys(const AttentionJob& job, const TileTask& task, int start, int n, uint32_t* out) {
  int H = job.head_dim, words = (H + kPerWord<F> - 1) / kPerWord<F>;
  for (int panel = 0; panel < kPanelsOfKeys; panel++, out += words * kLanes) {
    int m = n - panel * kLanes;
    m = m < 0 ? 0 : m < kLanes ? m : kLanes;
    if (m < kLanes) memset(out, 0, words * kLanes * sizeof(uint32_t));
    for (int j = 0; j < m; j++) {
      const P* key = key_at<P>(job, job.k_pages, task.row, task.head, start + panel * kLanes + j);
      for (int i = 0; i < words; i++) out[i * kLanes + j] = word_of<F>(key, i, H);
    }
  }
}

// Values as the panels of a product over the keys: [panel of head][word of keys][32 of head].
template <Format F, class P>
void pack_values(const AttentionJob& job, const TileTask& task, int start, int n, uint32_t* out) {
  constexpr int words = kBlockKeys / kPerWord<F>;
  int H = job.head_dim;
  int used = (n + kPerWord<F> - 1) / kPerWord<F>;
  for (int first = 0; first < H; first += kLanes, out += words * kLanes) {
    int m = H - first < kLanes ? H - first : kLanes;
    memset(out + used * kLanes, 0, (words - used) * kLanes * sizeof(uint32_t));
    for (int j = 0; j < used; j++) {
      int s = start + j * kPerWord<F>;
      const P* value = key_at<P>(job, job.v_pages, task.row, task.head, s) + first;
      bool pair = kPerWord<F> == 2 && j * 2 + 1 < n;
      const P* second = value;
      if (pair) second = key_at<P>(job, job.v_pages, task.row, task.head, s + 1) + first;
      for (int i = 0; i < kLanes; i += W) {
        vu low = (vu)(i < m ? load_part(value + i, m - i) : vf{});
        if constexpr (F == Format::kBfloat16) {
          vu high = (vu)(pair && i < m ? load_part(second + i, m - i) : vf{});
          low = (low >> 16) | (high & 0xffff0000u);
        }
        store_words(out + j * kLanes + i, low);
      }
    }
  }
}

// out = rows @ panel for any number of rows, [num_rows][32] sums each.
template <Format F, class Use>
JI_INLINE void multiply(
    const uint32_t* rows, int num_rows, size_t stride, const uint32_t* panel, int num_words,
    Use use) {
  float sums[kTileRows<F> * kLanes];
  for (int row = 0; row < num_rows;) {
    int n = next_rows<F>(num_rows - row);
    tile_of<F>(n)(rows + row * stride, stride, panel, num_words, sums);
    for (int r = 0; r < n; r++) use(row + r, sums + r * kLanes);
    row += n;
  }
}

template <class P>
void attend_tile_of(const AttentionJob& job, const TileTask& task, void* memory) {
  constexpr Format F = kFormat<P>;
  int G = job.group, H = job.head_dim, M = task.num_tokens * G;
  int head_words = (H + kPerWord<F> - 1) / kPerWord<F>;
  constexpr int key_words = kBlockKeys / kPerWord<F>;
  int padded = (H + kLanes - 1) / kLanes * kLanes;
  Scratch scratch{(char*)memory};
  uint32_t* q = scratch.take<uint32_t>((size_t)M * head_words);
  uint32_t* keys = scratch.take<uint32_t>(kPanelsOfKeys * head_words * kLanes);
  uint32_t* values = scratch.take<uint32_t>(padded * key_words);
  float* scores = scratch.take<float>((size_t)M * kBlockKeys);
  uint32_t* weights = scratch.take<uint32_t>((size_t)M * key_words);
  float* weighted = scratch.take<float>((size_t)M * padded);
  float* peak = scratch.take<float>(M);
  float* sums = scratch.take<float>(M);
  float* rescale = scratch.take<float>(M);
  float* head = scratch.take<float>(H);

  for (int m = 0; m < M; m++) {
    int g = m % G;
    load_query(job, task.first_token + m / G, task.head, g, head);
    to_words<F>(head, H, q + (size_t)m * head_words, head_words);
    peak[m] = job.sinks ? job.sinks[task.head * G + g] : kNothing;
    sums[m] = job.sinks ? 1.0f : 0.0f;
  }
  memset(weighted, 0, (size_t)M * padded * sizeof(float));

  int end = task.first_position + task.num_tokens;
  int first = job.window ? task.first_position - job.window + 1 : 0;
  first = first < 0 ? 0 : first;
  for (int block = first / kBlockKeys * kBlockKeys; block < end; block += kBlockKeys) {
    // Slots that no token of the tile sees are not read: they may hold anything.
    int start = block < first ? first : block;
    int n = (block + kBlockKeys < end ? block + kBlockKeys : end) - start;
    pack_keys<F, P>(job, task, start, n, keys);
    pack_values<F, P>(job, task, start, n, values);
    for (int panel = 0; panel < kPanelsOfKeys; panel++)
      multiply<F>(
          q, M, head_words, keys + panel * head_words * kLanes, head_words,
          [=](int m, const float* row) {
            memcpy(scores + m * kBlockKeys + panel * kLanes, row, kLanes * sizeof(float));
          });
    for (int m = 0; m < M; m++) {
      int position = task.first_position + m / G;
      int hidden = job.window ? position - job.window + 1 - start : 0;
      int seen = position + 1 - start;
      float* row = scores + m * kBlockKeys;
      float sum = soften(job, row, hidden, seen < n ? seen : n, peak + m, rescale + m);
      sums[m] = sums[m] * rescale[m] + sum;
      to_words<F>(row, kBlockKeys, weights + m * key_words, key_words);
    }
    for (int d = 0; d < padded; d += kLanes)
      multiply<F>(
          weights, M, key_words, values + d * key_words, key_words,
          [=](int m, const float* row) {
            float* at = weighted + (size_t)m * padded + d;
            for (int i = 0; i < kLanes; i += W)
              store(at + i, load(at + i) * rescale[m] + load(row + i));
          });
  }
  for (int m = 0; m < M; m++)
    write_out(
        job, task.first_token + m / G, task.head, m % G, weighted + (size_t)m * padded, sums[m]);
}

void attend_tile(const AttentionJob& job, const TileTask& task, void* scratch) {
  if (job.page_number == Number::kFloat32)
    attend_tile_of<float>(job, task, scratch);
  else
    attend_tile_of<bf16>(job, task, scratch);
}

size_t scratch_bytes(const AttentionJob& job, int tile_tokens) {
  size_t H = job.head_dim, padded = (H + kLanes - 1) / kLanes * kLanes;
  size_t rows = (size_t)job.group * tile_tokens;
  size_t per_row = H + 2 * kBlockKeys + padded + 3;
  size_t packed = kBlockKeys * (H + padded);
  size_t one_token = 2 * (size_t)job.group * (H + 1) + W;
  // Each of the dozen pieces is rounded up to 64 bytes.
  return sizeof(float) * (rows * per_row + packed + one_token + H) + 16 * 64;
}

}  // namespace
}  // namespace jaxinfer
