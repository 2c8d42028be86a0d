// Jobs, shared among threads.
#pragma once

#include "isa.h"
#include "pool.h"

namespace jaxinfer {

// Fills in `words` of the job, and computes all of its outputs.
void run_linear(LinearJob job, const Kernels& kernels, Pool& pool);

// The rows of a step as pallas_kernels.RaggedBatch has them.
struct Rows {
  const int32_t* seq_lens;         // [max_rows]
  const int32_t* query_start_loc;  // [max_rows + 1]
  int num_decode_rows;
  int num_rows;
};

// Stores the new keys and values if the job has slots, and attends.
void run_attention(const AttentionJob& job, const Rows& rows, const Kernels& kernels, Pool& pool);

// A thread's scratch memory of at least so many bytes, aligned for vectors. One use at a time.
void* scratch_memory(size_t bytes);

}  // namespace jaxinfer
