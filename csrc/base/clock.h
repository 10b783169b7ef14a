// Time as a function pointer, so that tests and replays drive it and nothing sleeps.
#pragma once

#include <chrono>
#include <cstdint>

namespace mybackend {

using ClockFn = std::int64_t (*)() noexcept;  // nanoseconds since an arbitrary start

inline std::int64_t steady_now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Microseconds since the Unix epoch: what snapshots carry.
inline std::int64_t wall_now_us() noexcept {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace mybackend
