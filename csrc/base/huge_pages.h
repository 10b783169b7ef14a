// Memory from the system for what is large: where huge pages are to be had, a page fault and an
// entry of the address translation serve 2 MiB instead of 4 KiB.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "base/units.h"

namespace mybackend {

inline constexpr std::size_t kHugePageBytes = 2 * kMiB;

// Zeroed pages of the system, from a 2 MiB boundary on; nullptr when there are none. `bytes`: a
// multiple of 4096. munmap() gives them back.
inline void* map_huge_pages(std::size_t bytes) noexcept {
  constexpr std::size_t kPageBytes = 4096;
  const std::size_t padded = bytes + kHugePageBytes - kPageBytes;
  void* raw = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto start = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t aligned = round_up(start, kHugePageBytes);
  if (aligned > start) munmap(raw, aligned - start);
  const std::uintptr_t end = start + padded;
  if (end > aligned + bytes) munmap(reinterpret_cast<void*>(aligned + bytes), end - aligned - bytes);
  // Advice: where huge pages are switched off, small ones serve.
  (void)madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);
  return reinterpret_cast<void*>(aligned);
}

}  // namespace mybackend
