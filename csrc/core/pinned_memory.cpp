#include "core/pinned_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "base/units.h"

namespace mybackend {

void* PinnedMemory::allocate(std::size_t bytes) {
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (bytes > kUnlimitedBytes - page_bytes) return nullptr;
  const std::size_t rounded = round_up(bytes, page_bytes);
  void* ptr = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (ptr == MAP_FAILED) return nullptr;
  const bool locked = mlock(ptr, rounded) == 0;
  std::lock_guard lock(mutex_);
  blocks_.emplace(reinterpret_cast<std::uintptr_t>(ptr), Block{rounded, locked});
  const auto amount = static_cast<std::int64_t>(rounded);
  stats_.current_bytes += amount;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.current_bytes);
  stats_.peak_blocks = std::max(stats_.peak_blocks, ++stats_.current_blocks);
  stats_.total_allocated_bytes += amount;
  ++stats_.allocation_count;
  if (!locked) stats_.unlocked_bytes += amount;
  return ptr;
}

bool PinnedMemory::free(void* ptr) noexcept {
  Block block;
  {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
    if (found == blocks_.end()) return false;
    block = found->second;
    blocks_.erase(found);
    const auto amount = static_cast<std::int64_t>(block.bytes);
    stats_.current_bytes -= amount;
    --stats_.current_blocks;
    stats_.total_freed_bytes += amount;
    ++stats_.free_count;
    if (!block.locked) stats_.unlocked_bytes -= amount;
  }
  munmap(ptr, block.bytes);
  return true;
}

bool PinnedMemory::contains(const void* ptr) const noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::lock_guard lock(mutex_);
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return false;
  --next;
  return address < next->first + next->second.bytes;
}

PinnedStats PinnedMemory::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void PinnedMemory::reset_peak() {
  std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.current_bytes;
  stats_.peak_blocks = stats_.current_blocks;
}

void PinnedMemory::reset_accumulated() {
  std::lock_guard lock(mutex_);
  stats_.total_allocated_bytes = stats_.total_freed_bytes = stats_.allocation_count = stats_.free_count = 0;
}

}  // namespace mybackend
