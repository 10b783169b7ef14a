// The thread-local pool of host memory.
//
//   class    sizes are rounded up to a power of two, 64 B to 4 MiB: 17 classes
//   pool     one per thread: up to 32 free blocks of each class, and at most
//            max_cached_bytes() of them together
//   large    above 4 MiB: straight from and to the system
//
// Every block is aligned to 64 bytes. Allocation and free touch only the calling thread's
// pool: no lock, no shared cache line. A block may be freed on any thread; it joins that
// thread's pool, within its bounds. A thread's blocks go back to the system when it exits; a
// free later than that (from another thread_local's destructor, say) goes to the system
// directly. When the system is out of memory the thread's pool is flushed, the other threads
// are asked to flush theirs, and the allocation is tried once more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mybackend {

inline constexpr std::size_t kCpuAlignment = 64;
inline constexpr std::size_t kCpuPoolMaxBytes = std::size_t{4} << 20;
inline constexpr int kCpuPoolClassCount = 17;
inline constexpr int kCpuPoolBlocksPerClass = 32;

namespace cpu_pool {

// At least `bytes` (> 0) bytes, or nullptr when the system has none.
void* allocate(std::size_t bytes) noexcept;
// `bytes` as given to allocate().
void deallocate(void* ptr, std::size_t bytes) noexcept;
// What allocate(bytes) really hands out: the class size, or `bytes` rounded to the alignment.
std::size_t capacity_bytes(std::size_t bytes) noexcept;

struct ClassStats {
  std::size_t block_bytes = 0;
  std::int64_t hits = 0;
  std::int64_t misses = 0;
  std::int64_t cached_blocks = 0;
};

struct Stats {
  std::int64_t hits = 0;          // served from a pool
  std::int64_t misses = 0;        // had to ask the system
  std::int64_t large = 0;         // above 4 MiB
  std::int64_t cached_bytes = 0;  // in all living threads' pools
  std::int64_t threads = 0;       // living threads that have a pool
  std::vector<ClassStats> classes;
};

// Sums over all threads, exited ones included. Exact when no other thread is allocating.
Stats stats();

// Frees the calling thread's cached blocks; other threads free theirs at their next
// allocation or free. Returns the bytes that the calling thread gave back.
std::size_t trim() noexcept;

// The bound on one thread's cached bytes (default 64 MiB); returns the previous one.
std::size_t set_max_cached_bytes(std::size_t bytes) noexcept;
std::size_t max_cached_bytes() noexcept;

// Around fork(): the registry of pools must not be locked by another thread then.
void lock_for_fork();
void unlock_after_fork();

// The system's allocator, for tests: nullptr restores posix_memalign and free.
using SystemAllocateFn = void* (*)(std::size_t bytes);
void set_system_allocate_for_testing(SystemAllocateFn allocate) noexcept;

}  // namespace cpu_pool
}  // namespace mybackend
