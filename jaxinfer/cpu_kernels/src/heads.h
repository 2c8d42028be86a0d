// Heads on their way into attention: from a token's projections, normed and rotated, to a page or to
// queries; and the scratch memory of a task.
#pragma once

#include "panels.h"

namespace jaxinfer {
namespace {

// Hands out pieces of a task's scratch memory, each aligned for vectors.
struct Scratch {
  char* next;

  template <class T>
  T* take(size_t n) {
    T* piece = (T*)next;
    next += (n * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

// The head at `index` behind a KV head's first query, as float32 [head_dim].
JI_INLINE void load_head(const AttentionJob& job, int token, int head, int index, float* out) {
  size_t at = ((size_t)token * job.num_kv_heads + head) * job.group_stride + index;
  at *= job.head_dim;
  if (job.number == Number::kFloat32)
    to_floats((const float*)job.heads + at, job.head_dim, out);
  else
    to_floats((const bf16*)job.heads + at, job.head_dim, out);
}

// Turns pairs of dimensions by a token's phases (arXiv:2104.09864), in place.
JI_INLINE void rotate(const AttentionJob& job, int token, float* x) {
  if (!job.cosines) return;
  int n = job.rotary_half;
  const float* cosines = job.cosines + (size_t)token * n;
  const float* sines = job.sines + (size_t)token * n;
  if (job.interleaved) {
    for (int i = 0; i < n; i++) {
      float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cosines[i] - b * sines[i];
      x[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
    return;
  }
  for (int i = 0; i < n; i += W) {
    int m = n - i;
    vf a = load_part(x + i, m), b = load_part(x + n + i, m);
    vf c = load_part(cosines + i, m), s = load_part(sines + i, m);
    store_part(x + i, a * c - b * s, m);
    store_part(x + n + i, b * c + a * s, m);
  }
}

JI_INLINE void load_rotated(
    const AttentionJob& job, int token, int head, int index, const float* norm, float* out) {
  load_head(job, token, head, index, out);
  if (norm) rms_norm(out, job.head_dim, norm, job.eps);
  rotate(job, token, out);
}

// Queries are scaled before they are multiplied, as the reference does it.
JI_INLINE void load_query(const AttentionJob& job, int token, int head, int g, float* out) {
  load_rotated(job, token, head, g, job.q_norm, out);
  for (int i = 0; i < job.head_dim; i += W)
    store_part(out + i, load_part(out + i, job.head_dim - i) * job.scale, job.head_dim - i);
}

JI_INLINE size_t page_offset(const AttentionJob& job, int page, int head, int offset) {
  size_t slot = ((size_t)page * job.num_kv_heads + head) * job.page_size + offset;
  return slot * job.head_dim;
}

template <class P>
JI_INLINE const P* key_at(const AttentionJob& job, const void* pages, int row, int head, int s) {
  int page = job.page_table[(size_t)row * job.pages_per_row + s / job.page_size];
  return (const P*)pages + page_offset(job, page, head, s % job.page_size);
}

// Where the heads of `n` positions from `start` on lie. A page's lie one behind the other: a division
// for each of them would take as long as the products with it.
template <class P>
JI_INLINE void keys_at(
    const AttentionJob& job, const void* pages, int row, int head, int start, int n,
    const P** out) {
  const int* table = job.page_table + (size_t)row * job.pages_per_row;
  int page = start / job.page_size, offset = start % job.page_size;
  for (int j = 0; j < n; page++, offset = 0) {
    const P* first = (const P*)pages + page_offset(job, table[page], head, offset);
    int end = j + job.page_size - offset;
    for (end = end < n ? end : n; j < end; j++, first += job.head_dim) out[j] = first;
  }
}

JI_INLINE void write_to_page(
    const AttentionJob& job, void* pages, const float* x, int page, int head, int offset) {
  size_t at = page_offset(job, page, head, offset);
  if (job.page_number == Number::kFloat32)
    to_floats(x, job.head_dim, (float*)pages + at);
  else
    to_bf16(x, job.head_dim, (bf16*)pages + at, 0);
}

void store_token(const AttentionJob& job, int token, int head, void* scratch) {
  int slot = job.slots[token];
  int page = slot / job.page_size, offset = slot % job.page_size;
  if (slot < 0 || page >= job.num_pages) return;
  float* x = Scratch{(char*)scratch}.take<float>(job.head_dim);
  load_rotated(job, token, head, job.group, job.k_norm, x);
  write_to_page(job, job.k_pages, x, page, head, offset);
  load_head(job, token, head, job.group + 1, x);
  write_to_page(job, job.v_pages, x, page, head, offset);
}

JI_INLINE vf soft_cap(const AttentionJob& job, vf scores) {
  if (job.softcap == 0.0f) return scores;
  return job.softcap * hyperbolic_tangent(scores / job.softcap);
}

// out = weighted / sum, 0 where nothing was seen.
JI_INLINE void write_out(
    const AttentionJob& job, int token, int head, int g, const float* weighted, float sum) {
  size_t at = ((size_t)token * job.num_kv_heads + head) * job.group + g;
  at *= job.head_dim;
  float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int i = 0; i < job.head_dim; i += W) {
    int n = job.head_dim - i;
    vf v = load_part(weighted + i, n) * factor;
    if (job.number == Number::kFloat32)
      store_part((float*)job.out + at + i, v, n);
    else
      store_part((bf16*)job.out + at + i, v, n);
  }
}

}  // namespace
}  // namespace jaxinfer
