#include "core/aligned_bytes.h"

#include <cstdlib>

#include "base/units.h"
#include "core/cpu_pool.h"

namespace mybackend {
namespace {

// For devices without a pool.
void* allocate_unpooled(std::size_t bytes) noexcept {
  void* ptr = nullptr;
  if (bytes > kUnlimitedBytes - kCpuAlignment) return nullptr;
  const std::size_t rounded = round_up(bytes, kCpuAlignment);
  if (posix_memalign(&ptr, kCpuAlignment, rounded) == 0) return ptr;
  cpu_pool::trim();
  return posix_memalign(&ptr, kCpuAlignment, rounded) == 0 ? ptr : nullptr;
}

struct Release {
  std::size_t nbytes;
  Device device;

  void operator()(std::byte* ptr) const noexcept {
    if (device == Device::CPU) {
      cpu_pool::deallocate(ptr, nbytes);
    } else {
      std::free(ptr);
    }
    aligned_bytes_tracker(device).track_free(nbytes);
  }
};

}  // namespace

const char* device_name(Device device) noexcept {
  return device == Device::CPU ? "CPU" : "GPU";
}

OutOfMemory::OutOfMemory(Device device, std::size_t requested_bytes, std::size_t live_bytes, std::size_t peak_bytes)
    : device(device),
      requested_bytes(requested_bytes),
      live_bytes(live_bytes),
      peak_bytes(peak_bytes),
      message_("out of memory on " + std::string(device_name(device)) + ": " + std::to_string(requested_bytes) + " bytes requested, " +
               std::to_string(live_bytes) + " bytes live, " + std::to_string(peak_bytes) + " bytes at the peak") {}

MemoryTracker& aligned_bytes_tracker(Device device) noexcept {
  static MemoryTracker trackers[2];
  return trackers[static_cast<int>(device)];
}

std::shared_ptr<std::byte[]> allocate_aligned_bytes(std::size_t nbytes, Device device) {
  if (nbytes == 0) return {};
  MemoryTracker& tracker = aligned_bytes_tracker(device);
  void* ptr = device == Device::CPU ? cpu_pool::allocate(nbytes) : allocate_unpooled(nbytes);
  if (ptr == nullptr) {
    const TrackerStats stats = tracker.stats();
    throw OutOfMemory(device, nbytes, static_cast<std::size_t>(stats.current_bytes), static_cast<std::size_t>(stats.peak_bytes));
  }
  // Counted first: if the control block cannot be made, the deleter runs and takes it back.
  tracker.track_alloc(nbytes);
  return std::shared_ptr<std::byte[]>(static_cast<std::byte*>(ptr), Release{nbytes, device});
}

}  // namespace mybackend
