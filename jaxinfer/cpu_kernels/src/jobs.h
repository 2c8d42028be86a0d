// What the kernels are asked to do: plain records, filled by linear.cc and attention.cc and carried
// out by one of the instruction sets. No C++ library here: isa.cc is compiled once for each set, and
// an inline function of the library that it shared with the others would be linked from any of them.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace jaxinfer {

enum class Number : int32_t { kFloat32, kBfloat16 };
enum class Format : int32_t { kInt8, kBfloat16, kFloat32 };
enum class Gate : int32_t { kNone, kSilu, kGeluTanh, kGelu };

inline constexpr int kLanes = 32;       // outputs of a panel
inline constexpr int kTail = 2;         // lines behind a panel's weights: scales, biases
inline constexpr int kBlockGroups = 16;  // words of int8 inputs that share a scale: 64 inputs

// y = x @ weight.T, the weights in panels of 32 outputs. Weights and inputs come in words of 4
// bytes: 4 int8, 2 bfloat16 or 1 float32, neighbours along the contraction.
//
//   weight: [panels][groups + kTail][32] words. int8 weights are stored with 128 added, as unsigned
//   bytes. Behind the last group of each panel stand 32 float scales and 32 float biases.
//
//   words: [rows][row_words]. Of int8, each block of 16 words (fewer at the end) stands behind its
//   own scale, a float, and minus 128 times the sum of its inputs, an int32, which takes back what
//   the weights have too much.
struct LinearJob {
  const void* x;  // [num_rows, num_inputs]
  Number x_number;
  int num_rows;
  int num_inputs;
  const float* norm;  // [num_inputs] scale of an RMS norm of x, or null
  float eps;
  Format format;
  const uint32_t* weight;
  int num_groups;
  Gate gate;             // else outputs [0, 16) of a panel gate outputs [16, 32)
  const void* residual;  // [num_rows, num_outputs] added to the result, or null
  void* out;             // [num_rows, num_outputs]
  Number out_number;     // of residual and out
  int num_outputs;
  // Made by `prepare_row`:
  uint32_t* words;
  size_t row_words;
};

inline size_t row_words(Format format, int num_groups) {
  if (format != Format::kInt8) return num_groups;
  return num_groups + 2 * ((num_groups + kBlockGroups - 1) / kBlockGroups);
}

// Attention of new tokens to pages; see pallas_kernels.paged_attention for the semantics.
struct AttentionJob {
  int num_tokens, num_kv_heads, head_dim;
  int group;         // queries of a KV head
  int group_stride;  // heads from one KV head's queries to the next: group, or group + 2 with k, v
  const void* heads;  // [num_tokens][num_kv_heads][group_stride][head_dim]
  void* out;          // [num_tokens][num_kv_heads][group][head_dim]
  Number number;      // of heads and out
  // Of new keys and values, which stand behind their queries; without slots they are in the pages.
  const int32_t* slots;  // [num_tokens], page * page_size + offset; beyond the pages: dropped
  const float *cosines, *sines;   // [num_tokens][rotary_half], or null
  int rotary_half;
  bool interleaved;
  const float *q_norm, *k_norm;  // [head_dim] scales of RMS norms, or null
  float eps;
  void *k_pages, *v_pages;  // [num_pages][num_kv_heads][page_size][head_dim]
  Number page_number;
  int num_pages, page_size;
  const int32_t* page_table;  // [rows][pages_per_row]
  int pages_per_row;
  float scale;
  int window;     // 0: none
  float softcap;  // 0: none
  const float* sinks;  // [num_kv_heads * group], or null
};

// A tile of one row's consecutive tokens and one KV head.
struct TileTask {
  int row, head;
  int first_token, num_tokens;
  int first_position;  // of the first token
};

// Keys [first, end) of a row with one new token and one KV head. Where a row is one task, it writes
// the result; else its running softmax, to be merged.
struct RowTask {
  int row, head, token;
  int first, end;
  float *weighted, *peak, *sum;  // [group][head_dim], [group], [group]; null: to `out`
};

// Fixed, so that a row's result depends neither on its neighbours nor on the number of threads.
inline constexpr int kBlockKeys = 64;

// The kernels of one instruction set.
struct Kernels {
  // Norms, quantizes and packs row `row` of x. `scratch`: num_inputs + 64 floats.
  void (*prepare_row)(const LinearJob&, int row, float* scratch);
  // Computes outputs of panels [first_panel, end_panel) for rows [first_row, end_row).
  void (*panels)(const LinearJob&, int first_panel, int end_panel, int first_row, int end_row);
  // Writes the new key and value of one token and KV head to its page.
  void (*store_token)(const AttentionJob&, int token, int head, void* scratch);
  void (*attend_row)(const AttentionJob&, const RowTask&, void* scratch);
  // Asks memory for what `attend_row` of this task reads first.
  void (*ask_for_row)(const AttentionJob&, const RowTask&);
  void (*attend_tile)(const AttentionJob&, const TileTask&, void* scratch);
  // out = the merged softmax of `num_parts` row tasks.
  void (*merge_row)(const AttentionJob&, const RowTask* parts, int num_parts);
  // What the scratch of the functions above must hold, for tiles of up to `tile_tokens`.
  size_t (*scratch_bytes)(const AttentionJob&, int tile_tokens);
};

}  // namespace jaxinfer
