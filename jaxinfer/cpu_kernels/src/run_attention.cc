#include <algorithm>
#include <cstring>

#include "run.h"

namespace jaxinfer {
namespace {

// Keys of one task of a row with one token. A longer row is shared among threads, at places that
// depend on its own length only.
constexpr int kPartKeys = 512;

// Of the rows' tasks, parts for each thread: few enough to have a next one, enough to even out.
constexpr int kRowParts = 6;

// Queries of a tile, over all heads of its group.
constexpr int kTileQueries = 96;

// Tokens whose keys are stored in one go.
constexpr int kStoredTokens = 16;

struct Plan {
  std::vector<RowTask> rows;
  std::vector<int> parts;  // of each row and head: the index of its first task; then the end
  std::vector<TileTask> tiles;
  std::vector<float> partial;
  bool is_split = false;
};

int tile_tokens(const AttentionJob& job) { return std::max(1, kTileQueries / job.group); }

void plan_rows(const AttentionJob& job, const Rows& rows, Plan& plan) {
  for (int row = 0; row < rows.num_decode_rows; row++) {
    int end = rows.seq_lens[row];
    int first = job.window ? std::max(0, end - job.window) : 0;
    for (int head = 0; head < job.num_kv_heads; head++) {
      plan.parts.push_back(static_cast<int>(plan.rows.size()));
      for (int start = first; start < end;) {
        int stop = std::min(end, (start / kPartKeys + 1) * kPartKeys);
        plan.rows.push_back(
            {row, head, rows.query_start_loc[row], start, stop, nullptr, nullptr, nullptr});
        start = stop;
      }
    }
  }
  plan.parts.push_back(static_cast<int>(plan.rows.size()));
  plan.is_split = plan.rows.size() + 1 > plan.parts.size();
  if (!plan.is_split) return;
  size_t weighted = static_cast<size_t>(job.group) * job.head_dim;
  size_t size = weighted + 2 * job.group;
  plan.partial.resize(plan.rows.size() * size);
  for (size_t i = 0; i + 1 < plan.parts.size(); i++) {
    if (plan.parts[i + 1] - plan.parts[i] == 1) continue;
    for (int task = plan.parts[i]; task < plan.parts[i + 1]; task++) {
      float* memory = plan.partial.data() + task * size;
      plan.rows[task].weighted = memory;
      plan.rows[task].peak = memory + weighted;
      plan.rows[task].sum = memory + weighted + job.group;
    }
  }
}

void plan_tiles(const AttentionJob& job, const Rows& rows, Plan& plan) {
  int most = tile_tokens(job);
  // The last tokens of a row see most keys: they come first, so that no thread is left with them.
  for (int row = rows.num_rows - 1; row >= rows.num_decode_rows; row--) {
    int first = rows.query_start_loc[row], end = rows.query_start_loc[row + 1];
    int tiles = (end - first + most - 1) / most;
    for (int tile = tiles - 1; tile >= 0; tile--) {
      int token = first + tile * most, n = std::min(most, end - token);
      for (int head = 0; head < job.num_kv_heads; head++)
        plan.tiles.push_back({row, head, token, n, rows.seq_lens[row] - (end - token)});
    }
  }
}

// Tokens of no row get zeros.
void clear_padding(const AttentionJob& job, const Rows& rows) {
  int used = rows.num_rows ? rows.query_start_loc[rows.num_rows] : 0;
  if (used == job.num_tokens) return;
  size_t token = static_cast<size_t>(job.num_kv_heads) * job.group * job.head_dim;
  token *= job.number == Number::kFloat32 ? 4 : 2;
  std::memset(
      static_cast<char*>(job.out) + used * token, 0, (job.num_tokens - used) * token);
}

// Whether rows may be tokens of one sequence, which read each other's new keys: such rows stand
// together and have the same pages. (Sequences with a common prefix look the same.)
bool have_relatives(const AttentionJob& job, const Rows& rows) {
  for (int row = 1; row < rows.num_rows; row++) {
    const int32_t* pages = job.page_table + static_cast<size_t>(row) * job.pages_per_row;
    if (*pages == *(pages - job.pages_per_row)) return true;
  }
  return false;
}

}  // namespace

void run_attention(const AttentionJob& job, const Rows& rows, const Kernels& kernels, Pool& pool) {
  thread_local Plan plan;
  plan.rows.clear(), plan.parts.clear(), plan.tiles.clear();
  plan_rows(job, rows, plan);
  plan_tiles(job, rows, plan);
  clear_padding(job, rows);

  // `plan` is this thread's; the tasks that run on others are given it by name.
  const Plan& shared = plan;
  int num_tiles = static_cast<int>(plan.tiles.size());
  int num_rows = static_cast<int>(plan.rows.size());
  // Rows' tasks are taken several at a time, so that one can ask memory for what the next reads.
  int row_parts = std::min(num_rows, kRowParts * pool.num_threads());
  size_t bytes = kernels.scratch_bytes(job, num_tiles ? tile_tokens(job) : 1);
  // A row that is one task a head stores its own key. Others' keys must stand before they are read.
  bool store_first =
      job.slots && (shared.is_split || num_tiles || have_relatives(job, rows));
  if (store_first) {
    int used = rows.query_start_loc[rows.num_rows];
    pool.run((used + kStoredTokens - 1) / kStoredTokens, [&](int part) {
      void* memory = scratch_memory(bytes);
      int end = std::min(used, (part + 1) * kStoredTokens);
      for (int token = part * kStoredTokens; token < end; token++)
        for (int head = 0; head < job.num_kv_heads; head++)
          kernels.store_token(job, token, head, memory);
    });
  }
  pool.run(num_tiles + row_parts, [&](int i) {
    void* memory = scratch_memory(bytes);
    if (i < num_tiles) return kernels.attend_tile(job, shared.tiles[i], memory);
    auto at = [&](int part) { return static_cast<int>(int64_t{num_rows} * part / row_parts); };
    int part = i - num_tiles, end = at(part + 1);
    for (int j = at(part); j < end; j++) {
      const RowTask& task = shared.rows[j];
      if (j + 1 < end) kernels.ask_for_row(job, shared.rows[j + 1]);
      if (job.slots && !store_first) kernels.store_token(job, task.token, task.head, memory);
      kernels.attend_row(job, task, memory);
    }
  });
  if (!shared.is_split) return;
  for (size_t i = 0; i + 1 < shared.parts.size(); i++) {
    int first = shared.parts[i], n = shared.parts[i + 1] - first;
    if (n > 1) kernels.merge_row(job, &shared.rows[first], n);
  }
}

}  // namespace jaxinfer
