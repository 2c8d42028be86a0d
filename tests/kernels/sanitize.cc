// Runs the kernels of every instruction set under a sanitizer: every operand in a heap block of
// exactly its size, from two threads at once, as two engines in a process would.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "run.h"

using namespace jaxinfer;

namespace {

struct Random {
  std::mt19937 engine;
  int between(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(engine);
  }
  std::vector<float> floats(size_t n) {
    std::vector<float> x(n);
    for (float& value : x) value = std::normal_distribution<float>()(engine);
    return x;
  }
};

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

void check_finite(const std::vector<float>& x, const char* what) {
  for (float value : x) check(std::isfinite(value), what);
}

// float32 panels against a plain product; the other formats for their memory only.
void linear(Random& random, const Kernels& kernels, Pool& pool) {
  LinearJob job{};
  job.num_rows = random.between(1, 30);
  job.num_inputs = random.between(1, 150);
  job.num_outputs = random.between(1, 100);
  job.format = static_cast<Format>(random.between(0, 2));
  job.gate = static_cast<Gate>(random.between(0, 3));
  int per_word = job.format == Format::kInt8 ? 4 : job.format == Format::kBfloat16 ? 2 : 1;
  int width = job.gate == Gate::kNone ? kLanes : kLanes / 2;
  int panels = (job.num_outputs + width - 1) / width;
  job.num_groups = (job.num_inputs + per_word - 1) / per_word;
  std::vector<float> x = random.floats(size_t(job.num_rows) * job.num_inputs);
  std::vector<float> norm = random.floats(job.num_inputs);
  std::vector<float> weight = random.floats(size_t(panels) * (job.num_groups + kTail) * kLanes);
  std::vector<float> residual = random.floats(size_t(job.num_rows) * job.num_outputs);
  std::vector<float> out(residual.size(), NAN);
  bool plain = random.between(0, 1);
  job.x = x.data();
  job.norm = plain ? nullptr : norm.data();
  job.eps = 1e-5f;
  job.weight = reinterpret_cast<const uint32_t*>(weight.data());
  job.residual = plain ? nullptr : residual.data();
  job.out = out.data();
  run_linear(job, kernels, pool);
  if (!plain || job.format != Format::kFloat32 || job.gate != Gate::kNone) return;
  check_finite(out, "outputs");
  for (int row = 0; row < job.num_rows; row++) {
    for (int n = 0; n < job.num_outputs; n++) {
      const float* panel = &weight[size_t(n / kLanes) * (job.num_groups + kTail) * kLanes];
      const float* lane = panel + n % kLanes;
      double sum = 0.0;
      for (int k = 0; k < job.num_inputs; k++)
        sum += double(x[row * job.num_inputs + k]) * lane[k * kLanes];
      sum = sum * lane[job.num_groups * kLanes] + lane[(job.num_groups + 1) * kLanes];
      check(std::abs(sum - out[row * job.num_outputs + n]) < 1e-3, "a product");
    }
  }
}

void attention(Random& random, const Kernels& kernels, Pool& pool) {
  constexpr int kPageSize = 8;
  AttentionJob job{};
  job.num_kv_heads = random.between(1, 3);
  job.head_dim = random.between(1, 40);
  job.group = random.between(1, 5);
  bool writes = random.between(0, 1);
  job.group_stride = job.group + (writes ? 2 : 0);
  job.page_number = static_cast<Number>(random.between(0, 1));
  job.page_size = kPageSize;
  job.pages_per_row = 90;
  job.scale = 0.3f;
  job.window = random.between(0, 1) ? random.between(1, 70) : 0;
  job.softcap = random.between(0, 1) ? 3.0f : 0.0f;
  int num_decode = random.between(0, 3), num_chunks = random.between(0, 2);
  int num_rows = num_decode + num_chunks, used = 0, pages = 0;
  std::vector<int32_t> seq_lens(num_rows), starts{0}, table(size_t(num_rows) * 90, -7), slots;
  for (int row = 0; row < num_rows; row++) {
    bool chunk = row >= num_decode;
    int keys = random.between(chunk ? 2 : 1, random.between(0, 3) ? 90 : 700);
    int fresh = chunk ? random.between(2, std::min(keys, 60)) : 1;
    seq_lens[row] = keys;
    starts.push_back(used += fresh);
    for (int page = 0; page * kPageSize < keys; page++) table[row * 90 + page] = pages++;
    for (int s = keys - fresh; s < keys; s++)
      slots.push_back(table[row * 90 + s / kPageSize] * kPageSize + s % kPageSize);
  }
  job.num_tokens = used + random.between(0, 3);
  job.num_pages = std::max(pages, 1);
  slots.resize(job.num_tokens, job.num_pages * kPageSize);
  size_t width = size_t(job.num_kv_heads) * job.head_dim;
  std::vector<float> heads = random.floats(job.num_tokens * width * job.group_stride);
  std::vector<float> out(job.num_tokens * width * job.group, NAN);
  std::vector<float> sinks = random.floats(job.num_kv_heads * job.group);
  std::vector<float> norm = random.floats(job.head_dim);
  job.rotary_half = random.between(0, job.head_dim / 2);
  std::vector<float> phases = random.floats(size_t(job.num_tokens) * job.rotary_half);
  size_t page_words = width * kPageSize * (job.page_number == Number::kFloat32 ? 2 : 1);
  std::vector<uint16_t> k_pages(job.num_pages * page_words), v_pages(k_pages.size());
  job.heads = heads.data();
  job.out = out.data();
  job.slots = writes ? slots.data() : nullptr;
  job.cosines = job.rotary_half ? phases.data() : nullptr;
  job.sines = phases.data();
  job.interleaved = random.between(0, 1);
  job.q_norm = random.between(0, 1) ? norm.data() : nullptr;
  job.k_norm = random.between(0, 1) ? norm.data() : nullptr;
  job.eps = 1e-5f;
  job.k_pages = k_pages.data();
  job.v_pages = v_pages.data();
  job.page_table = table.data();
  job.sinks = random.between(0, 1) ? sinks.data() : nullptr;
  run_attention(job, {seq_lens.data(), starts.data(), num_decode, num_rows}, kernels, pool);
  check_finite(out, "attention");
}

void work(int seed, int rounds) {
  Random random{std::mt19937(seed)};
  std::istringstream names(isa_names());
  for (std::string name; names >> name;) {
    for (int i = 0; i < rounds; i++) {
      linear(random, *kernels_of(name.c_str()), Pool::shared());
      attention(random, *kernels_of(name.c_str()), Pool::shared());
    }
  }
}

}  // namespace

int main(int, char** arguments) {
  int rounds = std::atoi(arguments[1]);
  std::thread other(work, 1, rounds);
  work(2, rounds);
  other.join();
  // A pool that ends, many short jobs in a row, more threads than processors.
  Pool pool(4);
  for (int i = 0; i < 20 * rounds; i++) {
    std::vector<int> seen(i % 50);
    pool.run(static_cast<int>(seen.size()), [&](int index) { seen[index]++; });
    for (int count : seen) check(count == 1, "each index once");
  }
  std::printf("clean: %s\n", isa_names());
}
