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
// How long an idle worker watches for work before it sleeps, and when it begins to give its core away meanwhile: what
// an engine does between two passes takes a good part of a millisecond, and waking up a thread some tenths of that.
constexpr std::chrono::microseconds kSpin{200}, kWatch{3000};

// Waits until `value` is no longer `old`. Gives the core away when that takes long: the machine may be oversubscribed,
// and the thread waited for then needs it.
void spin_until_changed(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; value.load(std::memory_order_acquire) == old; i++) {
    if (i < 300) {  // some ten microseconds
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace

Pool::Pool(int threads) : n_(threads) {
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
  counter_.store(0, std::memory_order_relaxed);
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

void Pool::barrier() {
  if (n_ == 1) {
    counter_.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    counter_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
  } else {
    spin_until_changed(phase_, phase);
  }
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    const auto begin = Clock::now();
    bool polite = false;
    for (int i = 1; epoch_.load(std::memory_order_acquire) == seen; i++) {
      if (polite) {
        std::this_thread::yield();
      } else {
        relax();
      }
      if (i % 64) continue;
      const auto waited = Clock::now() - begin;
      polite = waited > kSpin;
      if (waited < kWatch) continue;
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
