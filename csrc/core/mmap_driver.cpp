#include "core/mmap_driver.h"

#include <sys/statvfs.h>

namespace mybackend {

Status MmapDriver::device_info(int device, DeviceInfo* out) noexcept {
  if (Status status = base_->device_info(device, out); !status.ok()) return status;
  MemoryInfo info;
  if (Status status = memory_info(device, &info); !status.ok()) return status;
  out->total_bytes = info.total_bytes;
  return {};
}

Status MmapDriver::memory_info(int device, MemoryInfo* out) noexcept {
  if (folder_.empty()) return base_->memory_info(device, out);
  struct statvfs info{};
  if (::statvfs(folder_.c_str(), &info) != 0) return {StatusCode::kInvalidArgument, "cannot look at the folder '" + folder_ + "'"};
  out->free_bytes = static_cast<std::size_t>(info.f_bavail) * info.f_frsize;
  out->total_bytes = static_cast<std::size_t>(info.f_blocks) * info.f_frsize;
  return {};
}

Status MmapDriver::memory_allocate(int, std::size_t bytes, void** out) noexcept {
  try {
    std::unique_ptr<MappedRegion> region;
    Status status = folder_.empty() ? MappedRegion::map_anonymous(bytes, &region) : MappedRegion::map_temporary(folder_, bytes, &region);
    if (!status.ok()) return status;
    void* ptr = region->data();
    std::lock_guard lock(mutex_);
    regions_.emplace(ptr, std::move(region));
    *out = ptr;
    return {};
  } catch (const std::exception& error) {
    return {StatusCode::kOutOfMemory, error.what()};
  }
}

Status MmapDriver::memory_free(int device, void* ptr) noexcept {
  // What is queued may still use it.
  if (base_->maybe_busy(device)) (void)base_->device_synchronize(device);
  std::unique_ptr<MappedRegion> region;
  std::lock_guard lock(mutex_);
  const auto found = regions_.find(ptr);
  if (found == regions_.end()) return {StatusCode::kInvalidArgument, "memory_free: not a mapping of this driver"};
  region = std::move(found->second);
  regions_.erase(found);
  return {};
}

}  // namespace mybackend
