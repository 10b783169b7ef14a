#include "core/host_cache.h"

#include <sys/mman.h>

#include <iterator>

#include "base/units.h"
#include "core/size_steps.h"

namespace mybackend {
namespace {

constexpr std::size_t kPageBytes = 4096;

}  // namespace

HostCache::~HostCache() {
  trim();
}

std::size_t HostCache::class_bytes(std::size_t bytes) noexcept {
  if (bytes == 0 || bytes > (std::size_t{1} << 60)) return 0;
  return step_class_bytes(bytes, kPageBytes);
}

void* HostCache::allocate(std::size_t bytes) noexcept {
  const std::size_t rounded = class_bytes(bytes);
  if (rounded == 0) return nullptr;
  FreeList evicted;
  void* ptr = nullptr;
  try {
    {
      std::lock_guard lock(mutex_);
      SizeClass& c = classes_[rounded];
      if (!c.free.empty()) {
        const FreeList::iterator found = c.free.back();
        live_.emplace(found->ptr, rounded);
        ptr = found->ptr;
        c.free.pop_back();
        free_.erase(found);
        cached_bytes_ -= static_cast<std::int64_t>(rounded);
        live_bytes_ += static_cast<std::int64_t>(rounded);
        ++c.hits;
        ++c.live;
      }
      evict_locked(&evicted);
    }
    unmap_all(evicted);
    if (ptr != nullptr) return ptr;
    ptr = map_huge_pages(rounded);
    if (ptr == nullptr && trim() > 0) ptr = map_huge_pages(rounded);
    std::lock_guard lock(mutex_);
    SizeClass& c = classes_[rounded];
    ++c.misses;
    if (ptr == nullptr) return nullptr;
    live_.emplace(ptr, rounded);
    live_bytes_ += static_cast<std::int64_t>(rounded);
    ++c.live;
    return ptr;
  } catch (...) {  // no memory for a record of it
    if (ptr != nullptr) munmap(ptr, rounded);
    return nullptr;
  }
}

std::size_t HostCache::free(void* ptr) noexcept {
  FreeList evicted;
  std::size_t bytes = 0;
  {
    std::lock_guard lock(mutex_);
    const auto found = live_.find(ptr);
    if (found == live_.end()) return 0;
    bytes = found->second;
    live_.erase(found);
    live_bytes_ -= static_cast<std::int64_t>(bytes);
    SizeClass& c = classes_.find(bytes)->second;
    --c.live;
    try {
      free_.push_back({ptr, bytes, clock_()});
      try {
        c.free.push_back(std::prev(free_.end()));
        cached_bytes_ += static_cast<std::int64_t>(bytes);
      } catch (...) {
        evicted.splice(evicted.end(), free_, std::prev(free_.end()));
      }
    } catch (...) {
      munmap(ptr, bytes);
    }
    evict_locked(&evicted);
  }
  unmap_all(evicted);
  return bytes;
}

void HostCache::evict_locked(FreeList* out) noexcept {
  const std::int64_t old = decay_ns_ > 0 && !free_.empty() ? clock_() - decay_ns_ : INT64_MIN;
  while (!free_.empty() && (static_cast<std::size_t>(cached_bytes_) > max_cached_bytes_ || free_.front().freed_ns < old)) {
    const FreeBlock& block = free_.front();
    cached_bytes_ -= static_cast<std::int64_t>(block.bytes);
    ++evictions_;
    classes_.find(block.bytes)->second.free.pop_front();
    out->splice(out->end(), free_, free_.begin());
  }
}

void HostCache::unmap_all(FreeList& blocks) noexcept {
  for (const FreeBlock& block : blocks) munmap(block.ptr, block.bytes);
  blocks.clear();
}

std::size_t HostCache::trim() noexcept {
  FreeList all;
  std::size_t bytes = 0;
  {
    std::lock_guard lock(mutex_);
    all.swap(free_);
    for (auto& [size, c] : classes_) c.free.clear();
    bytes = static_cast<std::size_t>(cached_bytes_);
    cached_bytes_ = 0;
  }
  unmap_all(all);
  return bytes;
}

void HostCache::set_max_cached_bytes(std::size_t bytes) noexcept {
  FreeList evicted;
  {
    std::lock_guard lock(mutex_);
    max_cached_bytes_ = bytes;
    evict_locked(&evicted);
  }
  unmap_all(evicted);
}

void HostCache::set_decay_ns(std::int64_t decay_ns) noexcept {
  std::lock_guard lock(mutex_);
  decay_ns_ = decay_ns;
}

HostCache::Stats HostCache::stats() const {
  Stats result;
  std::lock_guard lock(mutex_);
  result.live_bytes = live_bytes_;
  result.cached_bytes = cached_bytes_;
  result.evictions = evictions_;
  result.max_cached_bytes = max_cached_bytes_;
  for (const auto& [bytes, c] : classes_) {
    result.classes.push_back({bytes, c.hits, c.misses, c.live, static_cast<std::int64_t>(c.free.size())});
    result.hits += c.hits;
    result.misses += c.misses;
  }
  return result;
}

}  // namespace mybackend
