// Our own threads: a second OpenMP runtime beside torch's would fight it for the cores.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace outrider {

// Runs one function on all its threads at a time. Threads that wait spin for a moment, so that what comes finds
// them awake, and then sleep.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return n_; }

  // Calls fn(thread) on every thread, the caller being thread 0. One region at a time: a second caller waits. `fn`
  // must not throw.
  void run(const std::function<void(int)>& fn);

  // Inside a region: waits until all threads are here. Also resets the counter of next().
  void barrier();

  // Inside a region: 0, 1, 2, ... over all threads, for work that is handed out piece by piece.
  int64_t next() { return counter_.fetch_add(1, std::memory_order_relaxed); }

 private:
  void work(int thread);
  void await(uint32_t phase);
  void stop();

  const int n_;
  std::mutex caller_;
  const std::function<void(int)>* job_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int64_t> counter_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  alignas(64) std::atomic<int> waiting_{0};
  std::condition_variable wake_, passed_;
  std::vector<std::thread> workers_;
};

}  // namespace outrider
