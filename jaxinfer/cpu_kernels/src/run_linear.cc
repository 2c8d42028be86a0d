#include <algorithm>
#include <cstdlib>
#include <new>

#include "run.h"

namespace jaxinfer {
namespace {

// Memory that grows and is never cleared.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* at_least(size_t bytes) {
    if (bytes <= size_) return data_;
    std::free(data_);
    size_ = (bytes + 4095) / 4096 * 4096;
    data_ = std::aligned_alloc(64, size_);
    if (!data_) throw std::bad_alloc();
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Below so many inputs the rows are made ready sooner than a second thread is called.
constexpr size_t kSharedInputs = 16384;

// Multiplications of a part of a product, about 10 microseconds': what a thread may have to wait for
// another's last part.
constexpr int64_t kPartProducts = 1 << 20;

// Rows computed with one load of a group of panels: of both, what the caches hold.
constexpr int kBlockRows = 192;

}  // namespace

void* scratch_memory(size_t bytes) {
  thread_local Buffer buffer;
  return buffer.at_least(bytes);
}

void run_linear(LinearJob job, const Kernels& kernels, Pool& pool) {
  thread_local Buffer prepared;
  job.row_words = row_words(job.format, job.num_groups);
  size_t num_words = job.num_rows * job.row_words;
  job.words = static_cast<uint32_t*>(prepared.at_least(num_words * sizeof(uint32_t)));

  size_t scratch = sizeof(float) * (job.num_inputs + 64);
  auto prepare = [&](int first, int end) {
    float* memory = static_cast<float*>(scratch_memory(scratch));
    for (int row = first; row < end; row++) kernels.prepare_row(job, row, memory);
  };
  if (static_cast<size_t>(job.num_rows) * job.num_inputs < kSharedInputs) {
    prepare(0, job.num_rows);
  } else {
    int parts = std::min(job.num_rows, 8 * pool.num_threads());
    pool.run(parts, [&](int i) {
      auto at = [&](int part) { return static_cast<int>(int64_t{job.num_rows} * part / parts); };
      prepare(at(i), at(i + 1));
    });
  }

  int width = job.gate == Gate::kNone ? kLanes : kLanes / 2;
  int num_panels = (job.num_outputs + width - 1) / width;
  int row_blocks = (job.num_rows + kBlockRows - 1) / kBlockRows;
  // A few parts a thread, however small; else so many that they even out.
  int64_t products = int64_t{job.num_rows} * job.num_inputs * num_panels * kLanes;
  int64_t parts = std::max<int64_t>(6 * pool.num_threads(), products / kPartProducts);
  int panel_blocks = static_cast<int>(std::clamp<int64_t>(parts / row_blocks, 1, num_panels));
  pool.run(row_blocks * panel_blocks, [&](int i) {
    int rows = i / panel_blocks, panels = i % panel_blocks;
    auto at = [&](int n, int part, int parts) {
      return static_cast<int>(int64_t{n} * part / parts);
    };
    kernels.panels(
        job, at(num_panels, panels, panel_blocks), at(num_panels, panels + 1, panel_blocks),
        at(job.num_rows, rows, row_blocks), at(job.num_rows, rows + 1, row_blocks));
  });
}

}  // namespace jaxinfer
