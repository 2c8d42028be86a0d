// The threads that share a kernel's work: one pool for the process, one synchronization a kernel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxinfer {

// Runs `task(i)` for i in [0, count), on the calling thread and on those of the pool.
//
// Whoever is free takes the next index, and the caller takes its share: a thread that is late, or
// gone after a fork, holds nobody up. A second caller, of another engine, finds the pool taken and
// does its work alone.
class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  template <class Task>
  void run(int count, const Task& task) {
    run(count, [](const void* context, int i) { (*static_cast<const Task*>(context))(i); }, &task);
  }

  // One thread for each processor that this process may use. Never destroyed: its threads may still
  // be asleep when the process ends.
  static Pool& shared();

 private:
  using Call = void (*)(const void* context, int index);

  void run(int count, Call call, const void* context);
  void work(uint64_t generation);
  void serve();
  bool is_new(uint64_t seen) const { return ticket_.load() >> 32 != seen; }

  std::vector<std::thread> threads_;
  std::mutex busy_;

  // The generation of the job in the upper half, the next index to take in the lower. An index is
  // taken by a compare-and-swap of both, so none is ever taken of a job that is over.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> done_{0};

  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace jaxinfer
