// The operating system's name of the calling thread, as debuggers and /proc show it.
#pragma once

#include <unistd.h>

#include <cstdint>

namespace mybackend {

inline std::uint64_t thread_id() noexcept {
  // Not kept per thread: a fork changes it, and only histories ask.
  return static_cast<std::uint64_t>(::gettid());
}

}  // namespace mybackend
