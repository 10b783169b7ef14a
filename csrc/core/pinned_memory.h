// Pinned host memory, first version: page-aligned blocks, locked with mlock where the process's
// limit allows it, known by address. Nothing is cached: each block is made and given back.
//
// A block that could not be locked works all the same; `unlocked_bytes` tells how much that is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace mybackend {

struct PinnedStats {
  std::int64_t current_bytes = 0, peak_bytes = 0;  // of the blocks, whole pages
  std::int64_t current_blocks = 0, peak_blocks = 0;
  std::int64_t total_allocated_bytes = 0, total_freed_bytes = 0;
  std::int64_t allocation_count = 0, free_count = 0;
  std::int64_t unlocked_bytes = 0;  // live bytes that the system did not let us lock
};

class PinnedMemory {
 public:
  // nullptr when the system has no memory. pre: bytes > 0.
  void* allocate(std::size_t bytes);
  // False for a pointer that is not a block's start.
  bool free(void* ptr) noexcept;
  // Whether the byte at ptr lies in a block; interior pointers too.
  bool contains(const void* ptr) const noexcept;

  PinnedStats stats() const;
  void reset_peak();
  void reset_accumulated();

  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  struct Block {
    std::size_t bytes;
    bool locked;
  };
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, Block> blocks_;
  PinnedStats stats_;
};

}  // namespace mybackend
