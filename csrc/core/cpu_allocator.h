// The allocator for ordinary CPU tensors: up to 4 MiB from the thread-local pool (cpu_pool.h),
// above from the process-wide cache (host_cache.h). A free needs the pointer alone.
//
// Counters are exact, in bytes of blocks (size classes): that is what a free can know.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/cpu_pool.h"
#include "core/host_cache.h"
#include "core/tracker.h"

namespace mybackend::cpu_allocator {

// At least `bytes` (> 0) bytes, aligned to 64; nullptr when the system has none even after the
// caches were emptied.
void* allocate(std::size_t bytes) noexcept;
// Any pointer that allocate() gave, on any thread, or one that the system's aligned allocation
// functions gave: what was allocated before this allocator was there may come too.
void deallocate(void* ptr) noexcept;

// Gives cached blocks back: the large ones, the calling thread's small ones now, the other
// threads' at their next allocation or free. Returns the bytes given back now.
std::size_t trim() noexcept;

// Of blocks handed out.
MemoryTracker& tracker() noexcept;
HostCache& large_cache() noexcept;

void lock_for_fork();
void unlock_after_fork();

}  // namespace mybackend::cpu_allocator
