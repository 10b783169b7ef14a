// Kernel records for torch.profiler's activity PrivateUse1: what ran on which device and stream, from
// when to when, and the operator that it belongs to.
#pragma once

#include <atomic>
#include <cstdint>

#include "torch/context.h"

namespace mybackend::glue {

enum class KernelKind : unsigned char { kKernel, kCopy };

inline std::atomic<bool> g_profiling{false};

// Whether a profile is being recorded now.
inline bool is_profiling() noexcept {
  return C10_UNLIKELY(g_profiling.load(std::memory_order_relaxed));
}

// Nanoseconds of the clock that the profiler's other events have; never 0.
std::int64_t profiler_now() noexcept;
// The operator that this thread is in, as the profiler numbers them.
std::uint64_t profiler_correlation() noexcept;
// Any thread. `name` is copied. Without a profile it does nothing.
void record_kernel(const char* name, KernelKind kind, c10::DeviceIndex device, StreamHandle stream, std::int64_t begin_ns,
                   std::int64_t end_ns, std::uint64_t correlation) noexcept;

}  // namespace mybackend::glue
