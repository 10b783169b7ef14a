#include "core/cpu_allocator.h"

#include <malloc.h>

#include <bit>
#include <cstdlib>

namespace mybackend::cpu_allocator {

namespace {

// The pool's blocks are the system's: a power of two each, and a little more.
std::size_t small_block_bytes(void* ptr) noexcept {
  return std::bit_floor(malloc_usable_size(ptr));
}

}  // namespace

MemoryTracker& tracker() noexcept {
  static MemoryTracker* tracker = new MemoryTracker;  // tensors may be freed after static destructors
  return *tracker;
}

HostCache& large_cache() noexcept {
  static HostCache* cache = new HostCache;
  return *cache;
}

void* allocate(std::size_t bytes) noexcept {
  void* ptr = nullptr;
  std::size_t block_bytes = 0;
  if (bytes <= kCpuPoolMaxBytes) {
    ptr = cpu_pool::allocate(bytes);
    if (ptr == nullptr && large_cache().trim() > 0) ptr = cpu_pool::allocate(bytes);
    if (ptr != nullptr) block_bytes = small_block_bytes(ptr);
  } else {
    ptr = large_cache().allocate(bytes);
    if (ptr == nullptr) {
      cpu_pool::trim();
      ptr = large_cache().allocate(bytes);
    }
    block_bytes = HostCache::class_bytes(bytes);
  }
  if (ptr != nullptr) tracker().track_alloc(block_bytes);
  return ptr;
}

void deallocate(void* ptr) noexcept {
  if (ptr == nullptr) return;
  // Large blocks begin at 2 MiB boundaries, which the system's hardly ever do.
  if ((reinterpret_cast<std::uintptr_t>(ptr) & (HostCache::kAlignment - 1)) == 0) {
    if (const std::size_t bytes = large_cache().free(ptr)) {
      tracker().track_free(bytes);
      return;
    }
  }
  const std::size_t block_bytes = small_block_bytes(ptr);
  if (block_bytes > kCpuPoolMaxBytes || block_bytes < kCpuAlignment) return std::free(ptr);  // not ours
  tracker().track_free(block_bytes);
  cpu_pool::deallocate(ptr, block_bytes);
}

std::size_t trim() noexcept {
  return cpu_pool::trim() + large_cache().trim();
}

void lock_for_fork() {
  large_cache().lock_for_fork();
}

void unlock_after_fork() {
  large_cache().unlock_after_fork();
}

}  // namespace mybackend::cpu_allocator
