// Linear layers on one thread: rows made ready for the product, and panels of outputs.
#pragma once

#include "tile.h"

namespace jaxinfer {
namespace {

// --- rows ---

JI_INLINE float sum_of_squares(const float* x, int n) {
  vf total{};
  int i = 0;
  for (; i + W <= n; i += W) total += load(x + i) * load(x + i);
  vf rest = load_part(x + i, n - i);
  return sum<float>(total + rest * rest);
}

// Scales as an RMS norm does (arXiv:1910.07467), in place.
JI_INLINE void rms_norm(float* x, int n, const float* scale, float eps) {
  float factor = 1.0f / sqrtf(sum_of_squares(x, n) / n + eps);
  for (int i = 0; i < n; i += W) {
    vf normed = load_part(x + i, n - i) * factor * load_part(scale + i, n - i);
    store_part(x + i, normed, n - i);
  }
}

template <class T>
JI_INLINE void to_floats(const T* x, int n, float* out) {
  for (int i = 0; i < n; i += W) store_part(out + i, load_part(x + i, n - i), n - i);
}

// One float32, bfloat16 pairs with a zero behind an odd end.
JI_INLINE void to_bf16(const float* x, int n, bf16* out, int padded) {
  for (int i = 0; i < n; i += W) store_part(out + i, load_part(x + i, n - i), n - i);
  for (int i = n; i < padded; i++) out[i] = {0};
}

// One block: n ≤ 64 inputs behind their scale and offset. x ≈ bytes * scale, with |bytes| ≤ 127. A
// block that is not finite gets the scale NaN.
JI_INLINE void quantize_block(const float* x, int n, uint32_t* out) {
  vf peaks{}, poison{};
  for (int i = 0; i < n; i += W) {
    vf v = load_part(x + i, n - i);
    peaks = larger(absolute(v), peaks);
    poison += v * 0.0f;  // 0, or NaN of a NaN or an infinity
  }
  float peak = largest(peaks);
  float factor = peak > 0.0f ? 127.0f / peak : 0.0f;
  // Of a peak so small that its inverse is infinite nothing is left.
  if (factor > 3e38f) factor = peak = 0.0f;
  int8_t* bytes = (int8_t*)(out + 2);
  vi total{};
  int i = 0;
  for (; i < n; i += W) {
    vf rounded = load_part(x + i, n - i) * factor + kRound;
    vi whole = (vi)rounded - bits_as<int32_t>(kRound);
    total += whole;
    vb narrow = narrow_to_bytes(whole);
    if (i + W <= n)
      store_bytes(bytes + i, narrow);
    else
      memcpy(bytes + i, &narrow, n - i);
  }
  for (i = n; i % 4; i++) bytes[i] = 0;
  float scale = sum<float>(poison) + peak / 127.0f;
  out[0] = bits_as<uint32_t>(scale);
  out[1] = (uint32_t)(-128 * sum<int32_t>(total));
}

JI_INLINE void quantize(const float* x, int n, uint32_t* out) {
  for (int i = 0; i < n; i += 4 * kBlockGroups, out += kBlockGroups + 2)
    quantize_block(x + i, n - i < 4 * kBlockGroups ? n - i : 4 * kBlockGroups, out);
}

void prepare_row(const LinearJob& job, int row, float* scratch) {
  int n = job.num_inputs;
  uint32_t* words = job.words + row * job.row_words;
  bool in_place = job.format == Format::kFloat32;
  float* x = in_place ? (float*)words : scratch;
  size_t first = (size_t)row * n;
  if (job.x_number == Number::kFloat32)
    to_floats((const float*)job.x + first, n, x);
  else
    to_floats((const bf16*)job.x + first, n, x);
  if (job.norm) rms_norm(x, n, job.norm, job.eps);
  if (job.format == Format::kInt8)
    quantize(x, n, words);
  else if (job.format == Format::kBfloat16)
    to_bf16(x, n, (bf16*)words, job.num_groups * 2);
}

// --- outputs ---

// erf by Abramowitz and Stegun 7.1.26, to 1.5e-7.
JI_INLINE vf error_function(vf x) {
  vf a = absolute(x);
  vf t = 1.0f / (1.0f + 0.3275911f * a);
  vf p = 1.061405429f * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  vf y = 1.0f - p * t * exponential(-a * a);
  return x < 0.0f ? -y : y;
}

JI_INLINE vf activate(Gate gate, vf x) {
  switch (gate) {
    case Gate::kSilu:
      return x * sigmoid(x);
    case Gate::kGeluTanh:
      return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    case Gate::kGelu:
      return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    case Gate::kNone:
      break;
  }
  return x;
}

template <class T>
JI_INLINE void write(const LinearJob& job, const float* y, int row, int first, int n) {
  size_t at = (size_t)row * job.num_outputs + first;
  T* out = (T*)job.out + at;
  const T* residual = job.residual ? (const T*)job.residual + at : nullptr;
  for (int i = 0; i < n; i += W) {
    vf v = load(y + i);
    if (residual) v += load_part(residual + i, n - i);
    store_part(out + i, v, n - i);
  }
}

// From a row's sums to outputs: scales, biases, gate, residual, type.
JI_INLINE void finish(
    const LinearJob& job, const float* sums, const float* tail, int row, int panel) {
  float y[kLanes];
  for (int i = 0; i < kLanes; i += W)
    store(y + i, load(sums + i) * load(tail + i) + load(tail + kLanes + i));
  int width = kLanes;
  if (job.gate != Gate::kNone) {
    width = kLanes / 2;
    for (int i = 0; i < width; i += W)
      store(y + i, activate(job.gate, load(y + i)) * load(y + width + i));
  }
  int first = panel * width;
  int n = job.num_outputs - first < width ? job.num_outputs - first : width;
  if (job.out_number == Number::kFloat32)
    write<float>(job, y, row, first, n);
  else
    write<bf16>(job, y, row, first, n);
}

template <Format F>
void panels_of(const LinearJob& job, int first_panel, int end_panel, int first_row, int end_row) {
  size_t lines = job.num_groups + kTail, stride = job.row_words;
  float sums[kTileRows<F> * kLanes];
  for (int panel = first_panel; panel < end_panel; panel++) {
    const uint32_t* weight = job.weight + panel * lines * kLanes;
    const float* tail = (const float*)(weight + (size_t)job.num_groups * kLanes);
    for (int row = first_row; row < end_row;) {
      int n = next_rows<F>(end_row - row);
      tile_of<F>(n)(job.words + row * stride, stride, weight, job.num_groups, sums);
      for (int r = 0; r < n; r++) finish(job, sums + r * kLanes, tail, row + r, panel);
      row += n;
    }
  }
}

void panels(const LinearJob& job, int first_panel, int end_panel, int first_row, int end_row) {
  switch (job.format) {
    case Format::kInt8:
      return panels_of<Format::kInt8>(job, first_panel, end_panel, first_row, end_row);
    case Format::kBfloat16:
      return panels_of<Format::kBfloat16>(job, first_panel, end_panel, first_row, end_row);
    case Format::kFloat32:
      return panels_of<Format::kFloat32>(job, first_panel, end_panel, first_row, end_row);
  }
}

}  // namespace
}  // namespace jaxinfer
