// allocate_aligned_bytes: an aligned, optionally pooled byte buffer with shared ownership,
// whose live bytes are counted per device.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <string>

#include "core/tracker.h"

namespace mybackend {

enum class Device { CPU, GPU };

const char* device_name(Device device) noexcept;

// Thrown when the system has no memory for a request, after the pools were flushed. Nothing
// was counted for it.
class OutOfMemory : public std::bad_alloc {
 public:
  OutOfMemory(Device device, std::size_t requested_bytes, std::size_t live_bytes, std::size_t peak_bytes);
  const char* what() const noexcept override { return message_.c_str(); }

  const Device device;
  const std::size_t requested_bytes;
  const std::size_t live_bytes;  // at the time of the failure, on `device`
  const std::size_t peak_bytes;

 private:
  std::string message_;
};

// The counters that allocate_aligned_bytes() keeps for `device`.
MemoryTracker& aligned_bytes_tracker(Device device) noexcept;

// A buffer of at least `nbytes` bytes, aligned to kCpuAlignment (64). CPU requests up to 4 MiB
// come from the thread-local pool (core/cpu_pool.h), with a capacity rounded up to a power of
// two; larger ones, and other devices', from the system. The last owner's release gives the
// block back and lowers the counters; it may happen on any thread, at any time.
// nbytes == 0 gives an empty pointer and touches no counter.
// Throws OutOfMemory.
std::shared_ptr<std::byte[]> allocate_aligned_bytes(std::size_t nbytes, Device device = Device::CPU);

}  // namespace mybackend
