#include "core/cpu_pool.h"

#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>

#include "base/thread_local.h"
#include "base/units.h"

namespace mybackend::cpu_pool {
namespace {

constexpr int kMinShift = 6;  // 64 B

struct Pool;

// Counters of a thread: written by it alone, read by stats() from others.
struct Counter {
  std::atomic<std::int64_t> value{0};
  void add(std::int64_t amount) noexcept { value.store(value.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed); }
  std::int64_t get() const noexcept { return value.load(std::memory_order_relaxed); }
};

struct FreeBlock {
  FreeBlock* next;
};

struct SizeClass {
  FreeBlock* head = nullptr;
  Counter count, hits, misses;
};

std::atomic<std::size_t> g_max_cached_bytes{64 * kMiB};
std::atomic<std::uint64_t> g_trim_epoch{0};
std::atomic<SystemAllocateFn> g_system_allocate{nullptr};
std::atomic<std::int64_t> g_large{0};

void* system_allocate(std::size_t bytes) noexcept {
  if (SystemAllocateFn replaced = g_system_allocate.load(std::memory_order_relaxed)) return replaced(bytes);
  void* ptr = nullptr;
  return posix_memalign(&ptr, kCpuAlignment, bytes) == 0 ? ptr : nullptr;
}

void system_free(void* ptr) noexcept {
  std::free(ptr);
}

// Every living pool, and what exited threads counted.
struct Registry {
  std::mutex mutex;
  Pool* first = nullptr;
  std::int64_t exited_hits[kCpuPoolClassCount] = {};
  std::int64_t exited_misses[kCpuPoolClassCount] = {};
};

Registry& registry() {
  static Registry* instance = new Registry;  // outlives every thread
  return *instance;
}

struct Pool {
  SizeClass classes[kCpuPoolClassCount];
  Counter cached_bytes;
  std::uint64_t seen_epoch = g_trim_epoch.load(std::memory_order_relaxed);
  Pool* next = nullptr;
  Pool* previous = nullptr;

  Pool() {
    Registry& r = registry();
    std::lock_guard lock(r.mutex);
    next = r.first;
    if (next) next->previous = this;
    r.first = this;
  }

  ~Pool() {
    flush();
    Registry& r = registry();
    std::lock_guard lock(r.mutex);
    if (previous)
      previous->next = next;
    else
      r.first = next;
    if (next) next->previous = previous;
    for (int i = 0; i < kCpuPoolClassCount; ++i) {
      r.exited_hits[i] += classes[i].hits.get();
      r.exited_misses[i] += classes[i].misses.get();
    }
  }

  std::size_t flush() noexcept {
    std::size_t released = 0;
    for (int i = 0; i < kCpuPoolClassCount; ++i) {
      SizeClass& c = classes[i];
      while (FreeBlock* block = c.head) {
        c.head = block->next;
        system_free(block);
        released += std::size_t{1} << (i + kMinShift);
      }
      c.count.add(-c.count.get());
    }
    cached_bytes.add(-cached_bytes.get());
    return released;
  }
};

// A pool is reached through plain thread-local words, which stay readable while and after
// the thread's destructors run; `Owner` only exists to notice the thread's exit.
enum class State : unsigned char { kUnused, kAlive, kGone };
thread_local constinit State t_state = State::kUnused;
MYBACKEND_HOT_THREAD_LOCAL Pool* t_pool = nullptr;

struct Owner {
  Owner() {
    t_pool = new Pool;
    t_state = State::kAlive;
  }
  ~Owner() {
    Pool* pool = t_pool;
    t_state = State::kGone;
    t_pool = nullptr;
    delete pool;
  }
};

[[gnu::noinline]] Pool* make_pool() noexcept {
  if (t_state == State::kGone) return nullptr;
  try {
    thread_local Owner owner;
    return t_pool;
  } catch (...) {
    return nullptr;  // no memory for the pool itself: the system serves this thread
  }
}

inline Pool* this_pool() noexcept {
  Pool* pool = t_pool;
  return pool != nullptr ? pool : make_pool();
}

inline void heed_trim(Pool* pool) noexcept {
  const std::uint64_t epoch = g_trim_epoch.load(std::memory_order_relaxed);
  if (pool->seen_epoch != epoch) {
    pool->seen_epoch = epoch;
    pool->flush();
  }
}

inline int class_of(std::size_t bytes) noexcept {
  return bytes <= kCpuAlignment ? 0 : std::bit_width(bytes - 1) - kMinShift;
}

[[gnu::noinline]] void* allocate_from_system(std::size_t bytes) noexcept {
  if (void* ptr = system_allocate(bytes)) return ptr;
  trim();
  return system_allocate(bytes);
}

}  // namespace

std::size_t capacity_bytes(std::size_t bytes) noexcept {
  if (bytes > kCpuPoolMaxBytes) {
    return bytes > kUnlimitedBytes - kCpuAlignment ? bytes : round_up(bytes, kCpuAlignment);
  }
  return std::size_t{1} << (class_of(bytes) + kMinShift);
}

void* allocate(std::size_t bytes) noexcept {
  if (bytes > kCpuPoolMaxBytes) {
    g_large.fetch_add(1, std::memory_order_relaxed);
    return allocate_from_system(capacity_bytes(bytes));
  }
  Pool* pool = this_pool();
  if (pool == nullptr) return allocate_from_system(capacity_bytes(bytes));
  heed_trim(pool);
  const int index = class_of(bytes);
  SizeClass& c = pool->classes[index];
  if (FreeBlock* block = c.head) {
    c.head = block->next;
    c.count.add(-1);
    c.hits.add(1);
    pool->cached_bytes.add(-(std::int64_t{1} << (index + kMinShift)));
    return block;
  }
  c.misses.add(1);
  return allocate_from_system(std::size_t{1} << (index + kMinShift));
}

void deallocate(void* ptr, std::size_t bytes) noexcept {
  if (ptr == nullptr) return;
  if (bytes > kCpuPoolMaxBytes) return system_free(ptr);
  Pool* pool = this_pool();
  if (pool == nullptr) return system_free(ptr);
  heed_trim(pool);
  const int index = class_of(bytes);
  SizeClass& c = pool->classes[index];
  const auto block_bytes = std::int64_t{1} << (index + kMinShift);
  const auto bound = static_cast<std::int64_t>(g_max_cached_bytes.load(std::memory_order_relaxed));
  if (c.count.get() >= kCpuPoolBlocksPerClass || pool->cached_bytes.get() + block_bytes > bound) {
    return system_free(ptr);
  }
  auto* block = static_cast<FreeBlock*>(ptr);
  block->next = c.head;
  c.head = block;
  c.count.add(1);
  pool->cached_bytes.add(block_bytes);
}

Stats stats() {
  Stats result;
  result.classes.resize(kCpuPoolClassCount);
  result.large = g_large.load(std::memory_order_relaxed);
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  for (int i = 0; i < kCpuPoolClassCount; ++i) {
    ClassStats& c = result.classes[i];
    c.block_bytes = std::size_t{1} << (i + kMinShift);
    c.hits = r.exited_hits[i];
    c.misses = r.exited_misses[i];
    for (Pool* pool = r.first; pool; pool = pool->next) {
      c.hits += pool->classes[i].hits.get();
      c.misses += pool->classes[i].misses.get();
      c.cached_blocks += pool->classes[i].count.get();
    }
    result.hits += c.hits;
    result.misses += c.misses;
  }
  for (Pool* pool = r.first; pool; pool = pool->next) {
    result.cached_bytes += pool->cached_bytes.get();
    ++result.threads;
  }
  return result;
}

std::size_t trim() noexcept {
  const std::uint64_t epoch = g_trim_epoch.fetch_add(1, std::memory_order_relaxed) + 1;
  Pool* pool = this_pool();
  if (pool == nullptr) return 0;
  pool->seen_epoch = epoch;
  return pool->flush();
}

std::size_t set_max_cached_bytes(std::size_t bytes) noexcept {
  return g_max_cached_bytes.exchange(bytes);
}

std::size_t max_cached_bytes() noexcept {
  return g_max_cached_bytes.load();
}

void lock_for_fork() {
  registry().mutex.lock();
}

void unlock_after_fork() {
  registry().mutex.unlock();
}

void set_system_allocate_for_testing(SystemAllocateFn allocate) noexcept {
  g_system_allocate.store(allocate);
}

}  // namespace mybackend::cpu_pool
