// Memory for weights and working space.
#pragma once

#include <cstdint>
#include <memory>

#ifdef OUTRIDER_SANITIZE
#include <sanitizer/asan_interface.h>
#endif

namespace outrider {

// Zeroed memory on a cache line boundary. Buffers lie side by side in large chunks of huge pages: reading some hundred
// separate weights once a step, a page of 4 KiB at a time, costs twice as long, as every page is a miss in the table of
// addresses and an end to what the processor fetches ahead. A chunk is freed with its last buffer.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes) { grow(bytes); }

  // At least `bytes` bytes; what was in it is lost when it grows. Throws std::bad_alloc.
  void grow(int64_t bytes);

  uint8_t* data() const { return data_.get(); }

 private:
  std::shared_ptr<uint8_t> data_;  // keeps its chunk
  int64_t size_ = 0;
};

// Cuts a stretch of memory in pieces. First pass without memory to learn the size, second pass to hand it out.
class Cutter {
 public:
  explicit Cutter(uint8_t* base) : base_(base) {}

  template <class T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T)), taken = (bytes + 63) / 64 * 64 + kGap;
#ifdef OUTRIDER_SANITIZE
    // What lies behind a piece is out of bounds too, though it is in the same stretch of memory.
    if (base_) ASAN_UNPOISON_MEMORY_REGION(piece, bytes), ASAN_POISON_MEMORY_REGION(base_ + used_ + bytes, taken - bytes);
#endif
    used_ += taken;
    return piece;
  }
  int64_t used() const { return used_; }

#ifdef OUTRIDER_SANITIZE
  static constexpr int64_t kGap = 128;
#else
  static constexpr int64_t kGap = 0;
#endif

 private:
  uint8_t* base_;
  int64_t used_ = 0;
};

}  // namespace outrider
