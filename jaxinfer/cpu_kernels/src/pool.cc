#include "pool.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <chrono>

namespace jaxinfer {
namespace {

constexpr uint64_t kTaken = 0xffffffff;  // an index behind every job's last

// Between the kernels of a step lie a few microseconds; a thread that slept through them would cost
// more to wake than they take. Between steps it may sleep.
constexpr std::chrono::microseconds kSpin(100);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int usable_processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

Pool::Pool(int num_threads) {
  for (int i = 1; i < num_threads; i++) threads_.emplace_back([this] { serve(); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Pool& Pool::shared() {
  static Pool* pool = new Pool(usable_processors());
  return *pool;
}

void Pool::run(int count, Call call, const void* context) {
  std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
  if (count <= 1 || threads_.empty() || !mine.owns_lock()) {
    for (int i = 0; i < count; i++) call(context, i);
    return;
  }
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  count_.store(count, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  generation &= 0xffffffff;
  ticket_.store(generation << 32);
  // Sequentially consistent with the sleepers' own check: either they see the new generation or
  // they are seen here.
  if (sleeping_.load() > 0) {
    { std::lock_guard<std::mutex> lock(sleep_); }
    wake_.notify_all();
  }
  work(generation);
  for (int spins = 0; done_.load(std::memory_order_acquire) < static_cast<uint32_t>(count);
       spins++) {
    // Whoever has the last indices may have lost its processor; give it ours.
    if (spins < 1000)
      pause();
    else
      std::this_thread::yield();
  }
  // Closed before the job's fields change: a late thread's compare-and-swap fails from here on.
  ticket_.store(generation << 32 | kTaken, std::memory_order_release);
}

void Pool::work(uint64_t generation) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (ticket >> 32 == generation) {
    Call call = call_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    uint32_t index = static_cast<uint32_t>(ticket & 0xffffffff);
    if (index >= count_.load(std::memory_order_relaxed)) return;
    // If this succeeds, the job was not over when its fields were read, because `index` was not done.
    if (!ticket_.compare_exchange_weak(
            ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire))
      continue;
    call(context, static_cast<int>(index));
    done_.fetch_add(1, std::memory_order_release);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void Pool::serve() {
  uint64_t seen = 0;
  while (!stopping_) {
    auto asleep = std::chrono::steady_clock::now() + kSpin;
    while (!is_new(seen) && !stopping_ && std::chrono::steady_clock::now() < asleep)
      for (int i = 0; i < 16; i++) pause();
    if (!is_new(seen)) {
      std::unique_lock<std::mutex> lock(sleep_);
      sleeping_++;
      wake_.wait(lock, [&] { return is_new(seen) || stopping_; });
      sleeping_--;
    }
    seen = ticket_.load(std::memory_order_acquire) >> 32;
    work(seen);
  }
}

}  // namespace jaxinfer
