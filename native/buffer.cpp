#include "buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace outrider {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kChunk = 16 * kHugePage;

std::shared_ptr<uint8_t> new_chunk(int64_t bytes) {
  const auto size = static_cast<size_t>((bytes + kHugePage - 1) / kHugePage * kHugePage);
  void* p = std::aligned_alloc(static_cast<size_t>(kHugePage), size);
  if (!p) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(p, size, MADV_HUGEPAGE);  // a wish: without it things are only slower
#endif
  return std::shared_ptr<uint8_t>(static_cast<uint8_t*>(p), [](uint8_t* chunk) { std::free(chunk); });
}

// The chunk that has room left; its users keep it alive, not this.
struct Open {
  std::mutex mutex;
  std::weak_ptr<uint8_t> chunk;
  int64_t used = 0;
};

std::shared_ptr<uint8_t> allocate(int64_t bytes) {
#ifdef OUTRIDER_SANITIZE  // each on its own, so that reading past its end is seen
  uint8_t* own = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(bytes)));
  if (!own) throw std::bad_alloc();
  return std::shared_ptr<uint8_t>(own, [](uint8_t* p) { std::free(p); });
#endif
  static Open open;
  if (bytes > kChunk / 2) return new_chunk(bytes);
  const std::lock_guard<std::mutex> lock(open.mutex);
  std::shared_ptr<uint8_t> chunk = open.chunk.lock();
  if (!chunk || open.used + bytes > kChunk) {
    chunk = new_chunk(kChunk);
    open.chunk = chunk;
    open.used = 0;
  }
  uint8_t* piece = chunk.get() + open.used;
  open.used += bytes;
  return std::shared_ptr<uint8_t>(std::move(chunk), piece);
}

}  // namespace

void Buffer::grow(int64_t bytes) {
  if (bytes <= size_) return;
  bytes = std::max(bytes, size_ * 3 / 2);  // what has to grow will have to grow again
  data_.reset();
  size_ = 0;
  const int64_t rounded = (std::max<int64_t>(bytes, 1) + 63) / 64 * 64;
  data_ = allocate(rounded);
  std::memset(data_.get(), 0, static_cast<size_t>(rounded));
  size_ = rounded;
}

}  // namespace outrider
