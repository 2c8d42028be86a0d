// Attention of one new token: its queries against the keys of its pages, read where they are.
#pragma once

#include "heads.h"

namespace jaxinfer {
namespace {

constexpr float kNothing = -__builtin_inff();

// Adds up the lanes of four vectors: [sum(a), sum(b), sum(c), sum(d)].
JI_INLINE void sum_four(const vf* v, float* out) {
#if defined(__AVX512F__)
  __m512 ab = (__m512)(vf)(_mm512_unpacklo_ps((__m512)v[0], (__m512)v[1]) +
                           _mm512_unpackhi_ps((__m512)v[0], (__m512)v[1]));
  __m512 cd = (__m512)(vf)(_mm512_unpacklo_ps((__m512)v[2], (__m512)v[3]) +
                           _mm512_unpackhi_ps((__m512)v[2], (__m512)v[3]));
  __m512 all = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
  __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
  _mm_storeu_ps(out, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#else
  for (int i = 0; i < 4; i++) out[i] = sum<float>(v[i]);
#endif
}

// Queries at a time: as many as leave their sums in registers.
constexpr int kQueries = W == 16 ? 4 : 2;

// scores[g][j] = query g · key j, for Q queries and the keys j .. j + 3.
template <int Q, class P>
JI_INLINE void score_keys(const float* q, int H, const P* const* keys, float* scores) {
  vf sums[Q][4] = {};
  for (int i = 0; i < H; i += W) {
    int n = H - i;
    vf k[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) k[j] = load_part(keys[j] + i, n);
#pragma GCC unroll 4
    for (int g = 0; g < Q; g++) {
      vf query = load(q + (size_t)g * H + i);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) sums[g][j] += query * k[j];
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < Q; g++) sum_four(sums[g], scores + g * kBlockKeys);
}

// weighted[g] = weighted[g] * rescale[g] + sum over keys of weights[g][j] * value j, for Q queries.
template <int Q, class P>
JI_INLINE void add_values(
    const float* weights, const P* const* values, int n, int H, const float* rescale, float* out) {
  constexpr int kVectors = W == 16 ? 4 : 2;
  int i = 0;
  for (; i + kVectors * W <= H; i += kVectors * W) {
    vf sums[Q][kVectors] = {};
    for (int j = 0; j < n; j++) {
      vf v[kVectors];
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; c++) v[c] = load(values[j] + i + c * W);
#pragma GCC unroll 4
      for (int g = 0; g < Q; g++)
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; c++) sums[g][c] += weights[g * kBlockKeys + j] * v[c];
    }
#pragma GCC unroll 4
    for (int g = 0; g < Q; g++)
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; c++) {
        float* at = out + (size_t)g * H + i + c * W;
        store(at, load(at) * rescale[g] + sums[g][c]);
      }
  }
  for (; i < H; i += W) {
    vf sums[Q] = {};
    for (int j = 0; j < n; j++) {
      vf v = load_part(values[j] + i, H - i);
      for (int g = 0; g < Q; g++) sums[g] += weights[g * kBlockKeys + j] * v;
    }
    for (int g = 0; g < Q; g++) {
      float* at = out + (size_t)g * H + i;
      store_part(at, load_part(at, H - i) * rescale[g] + sums[g], H - i);
    }
  }
}

// Scores → weights relative to the new peak, in place; returns their sum. Keys outside of
// [first, end) weigh nothing.
JI_INLINE float soften(
    const AttentionJob& job, float* scores, int first, int end, float* peak, float* rescale) {
  vf peaks = splat(kNothing);
  for (int j = 0; j < kBlockKeys; j += W) {
    vf s = soft_cap(job, load(scores + j));
    vi key = lane_index() + j;
    s = (key >= first) & (key < end) ? s : splat(kNothing);
    store(scores + j, s);
    peaks = larger(s, peaks);
  }
  float now = largest(peaks);
  now = now > *peak ? now : *peak;
  float shift = now == kNothing ? 0.0f : now;
  vf total{};
  for (int j = 0; j < kBlockKeys; j += W) {
    vf w = exponential(load(scores + j) - shift);
    store(scores + j, w);
    total += w;
  }
  *rescale = exponential(splat(*peak - shift))[0];
  *peak = now;
  return sum<float>(total);
}

// Asks memory for a head that is needed soon.
template <class P>
JI_INLINE void ask_for(const P* head, int H) {
  for (int i = 0; i < H; i += 64 / (int)sizeof(P)) __builtin_prefetch(head + i);
}

template <int Q, class P>
void attend_queries(
    const AttentionJob& job, const RowTask& task, const float* q, float* weighted, float* peak,
    float* sums) {
  int H = job.head_dim;
  float scores[kQueries * kBlockKeys], rescale[kQueries];
  const P *keys[kBlockKeys + 3], *values[kBlockKeys];
  for (int start = task.first; start < task.end;) {
    // Blocks lie at multiples of their size.
    int end = (start / kBlockKeys + 1) * kBlockKeys;
    int n = (end < task.end ? end : task.end) - start;
    keys_at(job, job.k_pages, task.row, task.head, start, n, keys);
    keys_at(job, job.v_pages, task.row, task.head, start, n, values);
    // The next of scattered pages, while this one is multiplied.
    for (int j = 0; j < n; j++) ask_for(values[j], H);
    // Fours read the last key again where there are fewer; `soften` drops what comes of it.
    for (int j = n; j < n + 3; j++) keys[j] = keys[n - 1];
    memset(scores, 0, sizeof scores);
    for (int j = 0; j < n; j += 4) score_keys<Q>(q, H, keys + j, scores + j);
    for (int g = 0; g < Q; g++) {
      float sum = soften(job, scores + g * kBlockKeys, 0, n, peak + g, rescale + g);
      sums[g] = sums[g] * rescale[g] + sum;
    }
    start += n;
    int next = task.end - start < kBlockKeys ? task.end - start : kBlockKeys;
    keys_at(job, job.k_pages, task.row, task.head, start, next, keys);
    for (int j = 0; j < next; j++) ask_for(keys[j], H);
    add_values<Q>(scores, values, n, H, rescale, weighted);
  }
}

template <class P>
void attend_all_queries(
    const AttentionJob& job, const RowTask& task, const float* q, float* weighted, float* peak,
    float* sums) {
  for (int g = 0; g < job.group;) {
    size_t at = (size_t)g * job.head_dim;
    auto attend = attend_queries<1, P>;
    int n = 1;
    if (job.group - g >= 2) attend = attend_queries<2, P>, n = 2;
#if defined(__AVX512F__)
    if (job.group - g == 3) attend = attend_queries<3, P>, n = 3;
    if (job.group - g >= 4) attend = attend_queries<4, P>, n = 4;
#endif
    attend(job, task, q + at, weighted + at, peak + g, sums + g);
    g += n;
  }
}

// Asks memory for the first keys of a task that comes next: nothing else does before it begins.
void ask_for_row(const AttentionJob& job, const RowTask& task) {
  int n = task.end - task.first < kBlockKeys ? task.end - task.first : kBlockKeys;
  auto ask = [&](auto page) {
    using P = decltype(page);
    const P* keys[kBlockKeys];
    keys_at(job, job.k_pages, task.row, task.head, task.first, n, keys);
    for (int j = 0; j < n; j++) ask_for(keys[j], job.head_dim);
  };
  job.page_number == Number::kFloat32 ? ask(0.0f) : ask(bf16{});
}

void attend_row(const AttentionJob& job, const RowTask& task, void* memory) {
  int G = job.group, H = job.head_dim;
  Scratch scratch{(char*)memory};
  // A vector more: the last of a row may be loaded whole.
  float* q = scratch.take<float>((size_t)G * H + W);
  float* weighted = task.weighted ? task.weighted : scratch.take<float>((size_t)G * H);
  float* peak = task.weighted ? task.peak : scratch.take<float>(G);
  float* sums = task.weighted ? task.sum : scratch.take<float>(G);
  memset(q + (size_t)G * H, 0, W * sizeof(float));
  memset(weighted, 0, (size_t)G * H * sizeof(float));
  for (int g = 0; g < G; g++) {
    load_query(job, task.token, task.head, g, q + (size_t)g * H);
    peak[g] = kNothing;
    sums[g] = 0.0f;
    // A sink is like a key with this score and no value, seen before all others.
    if (job.sinks && !task.weighted) {
      peak[g] = job.sinks[task.head * G + g];
      sums[g] = 1.0f;
    }
  }
  if (job.page_number == Number::kFloat32)
    attend_all_queries<float>(job, task, q, weighted, peak, sums);
  else
    attend_all_queries<bf16>(job, task, q, weighted, peak, sums);
  if (task.weighted) return;
  for (int g = 0; g < G; g++)
    write_out(job, task.token, task.head, g, weighted + (size_t)g * H, sums[g]);
}

void merge_row(const AttentionJob& job, const RowTask* parts, int num_parts) {
  int G = job.group, H = job.head_dim, head = parts[0].head;
  for (int g = 0; g < G; g++) {
    float peak = job.sinks ? job.sinks[head * G + g] : kNothing;
    for (int i = 0; i < num_parts; i++) peak = parts[i].peak[g] > peak ? parts[i].peak[g] : peak;
    float sum = job.sinks ? exponential(splat(job.sinks[head * G + g] - peak))[0] : 0.0f;
    float* total = parts[0].weighted + (size_t)g * H;
    for (int i = 0; i < num_parts; i++) {
      float factor = exponential(splat(parts[i].peak[g] - peak))[0];
      sum += parts[i].sum[g] * factor;
      const float* weighted = parts[i].weighted + (size_t)g * H;
      for (int d = 0; d < H; d += W) {
        vf v = load_part(weighted + d, H - d) * factor;
        if (i) v += load_part(total + d, H - d);
        store_part(total + d, v, H - d);
      }
    }
    write_out(job, parts[0].token, head, g, total, sum);
  }
}

}  // namespace
}  // namespace jaxinfer
