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
  return sum(total + rest * rest);
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

// x ≈ (out - 128) * scale, with |out - 128| ≤ 127. A row that is not finite gets the scale NaN.
JI_INLINE float quantize(const float* x, int n, uint8_t* out, int padded) {
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
  for (int i = 0; i < n; i += W) {
    vf rounded = load_part(x + i, n - i) * factor + kRound;
    vb bytes = __builtin_convertvector(bits_as<vu>(rounded) ^ 0x80u, vb);
    memcpy(out + i, &bytes, n - i < W ? n - i : W);
  }
  for (int i = n; i < padded; i++) out[i] = 128;
  return sum(poison) + peak / 127.0f;
}

void prepare_row(const LinearJob& job, int row, float* scratch) {
  int n = job.num_inputs;
  uint32_t* words = job.words + (size_t)row * job.num_groups;
  bool in_place = job.format == Format::kFloat32;
  float* x = in_place ? (float*)words : scratch;
  size_t first = (size_t)row * n;
  if (job.x_number == Number::kFloat32)
    to_floats((const float*)job.x + first, n, x);
  else
    to_floats((const bf16*)job.x + first, n, x);
  if (job.norm) rms_norm(x, n, job.norm, job.eps);
  job.scales[row] = 1.0f;
  if (job.format == Format::kInt8)
    job.scales[row] = quantize(x, n, (uint8_t*)words, job.num_groups * 4);
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

// From a row's sums to outputs: scale, bias, gate, residual, type.
template <Format F>
JI_INLINE void finish(
    const LinearJob& job, const void* sums, const uint32_t* tail, int row, int panel) {
  float y[kLanes];
  for (int i = 0; i < kLanes; i += W) {
    vf v;
    if constexpr (F == Format::kInt8) {
      vi exact = (vi)load_words((const int32_t*)sums + i) - (vi)load_words(tail + kLanes + i);
      vf scale = load((const float*)tail + i) * job.scales[row];
      v = __builtin_convertvector(exact, vf) * scale;
    } else {
      v = load((const float*)sums + i);
    }
    store(y + i, v + load((const float*)tail + 2 * kLanes + i));
  }
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
  size_t stride = job.num_groups;
  uint32_t sums[kTileRows * kLanes];
  for (int panel = first_panel; panel < end_panel; panel++) {
    const uint32_t* weight = job.weight + panel * (stride + kTail) * kLanes;
    const uint32_t* tail = weight + stride * kLanes;
    for (int row = first_row; row < end_row;) {
      int n = next_rows(end_row - row);
      tile_of<F>(n)(job.words + row * stride, stride, weight, job.num_groups, sums);
      for (int r = 0; r < n; r++) finish<F>(job, sums + r * kLanes, tail, row + r, panel);
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
