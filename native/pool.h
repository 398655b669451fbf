// Our own threads: a second OpenMP runtime beside torch's would fight it for the cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace outrider {

struct Range {
  int64_t from, to;
};

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

  // Inside a region: waits until all threads are here. Also resets the counters of next() and each().
  void barrier();

  // Inside a region: 0, 1, 2, ... over all threads, for work that is handed out piece by piece.
  int64_t next() { return counter_.fetch_add(1, std::memory_order_relaxed); }

  // Inside a region, once between two barriers, with the same `total` on every thread: calls run(range) until all of
  // 0 .. total is done. Each thread takes its own share piece by piece, from the second on every piece two smaller than
  // the one before and the last of one; and then what is left of the others'. So a core that is slower, or busy with
  // another program, holds up nobody for long.
  template <class Run>
  void each(int thread, int64_t total, const Run& run) {
    for (int t = thread; t < thread + n_; t++) {
      const int64_t owner = t % n_, from = total * owner / n_, to = total * (owner + 1) / n_;
      const auto pieces = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(to - from))));
      std::atomic<int64_t>& taken = taken_[static_cast<size_t>(owner)].pieces;
      // A look first: threads that only find out that nothing is left need not fight for the counter.
      for (int64_t left; taken.load(std::memory_order_relaxed) < pieces && (left = pieces - taken.fetch_add(1, std::memory_order_relaxed)) > 0;)
        run(Range{std::max(from, to - left * left), to - (left - 1) * (left - 1)});
    }
  }

 private:
  struct alignas(64) Taken {
    std::atomic<int64_t> pieces{0};
  };

  void reset_counters();
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
  const std::unique_ptr<Taken[]> taken_;  // of each thread's share
  std::vector<std::thread> workers_;
};

}  // namespace outrider
