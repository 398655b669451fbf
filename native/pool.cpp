#include "pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace outrider {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;
// How long a thread watches before it sleeps: for the others at a barrier, and, idle, for the next region. What an engine
// does between two passes takes some tenths of a millisecond, on a busy machine over a whole one, and waking up a thread
// adds to it. Nobody yields: Linux takes a yield for a slice used up, and a thread that yields often is put behind all
// others for seconds.
constexpr std::chrono::microseconds kPatience{50}, kWatch{2000};

}  // namespace

Pool::Pool(int threads) : n_(threads), taken_(new Taken[static_cast<size_t>(threads)]) {
  try {
    for (int i = 1; i < n_; i++) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {  // the system has no more threads to give
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& fn) {
  std::lock_guard<std::mutex> one(caller_);
  reset_counters();
  if (n_ == 1) return fn(0);
  job_ = &fn;
  epoch_.fetch_add(1);  // sequentially consistent with `sleeping_`: either we see the sleeper or it sees the epoch
  if (sleeping_.load()) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  fn(0);
  barrier();  // `fn` may go out of scope now
}

void Pool::reset_counters() {
  counter_.store(0, std::memory_order_relaxed);
  for (int t = 0; t < n_; t++) taken_[static_cast<size_t>(t)].pieces.store(0, std::memory_order_relaxed);
}

void Pool::barrier() {
  if (n_ == 1) return reset_counters();
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    reset_counters();
    phase_.store(phase + 1);  // sequentially consistent with `waiting_`: either we see the sleeper or it sees the phase
    if (waiting_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      passed_.notify_all();
    }
  } else {
    await(phase);
  }
}

void Pool::await(uint32_t phase) {
  const auto begin = Clock::now();
  do {
    for (int i = 0; i < 64; i++) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      relax();
    }
  } while (Clock::now() - begin < kPatience);
  // The machine is oversubscribed: sleep, so that the thread waited for can have this core.
  std::unique_lock<std::mutex> lock(mutex_);
  waiting_.fetch_add(1);
  passed_.wait(lock, [&] { return phase_.load() != phase; });
  waiting_.fetch_sub(1);
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    const auto begin = Clock::now();
    for (int i = 1; epoch_.load(std::memory_order_acquire) == seen; i++) {
      relax();
      if (i % 64 || Clock::now() - begin < kWatch) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return epoch_.load() != seen; });
      sleeping_.fetch_sub(1);
    }
    seen++;
    if (stop_) return;
    (*job_)(thread);
    barrier();
  }
}

}  // namespace outrider
