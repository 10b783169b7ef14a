// Memory that others reach too: other processes, other devices, and (host memory) all devices.
#include <algorithm>
#include <atomic>
#include <map>

#include "driver/cuda/cuda_driver_internal.h"

namespace mybackend {

Status CudaDriver::export_mapped(int device, const void* ptr, std::size_t bytes, std::vector<SharedPage>* out,
                                 std::size_t* page_bytes) noexcept {
  MYBACKEND_ON_DEVICE(device);
  if (!devices_[static_cast<std::size_t>(device)]->exports) {
    return {StatusCode::kNotSupported, "device " + std::to_string(device) + " cannot export memory as file descriptors"};
  }
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::unique_lock lock(ranges_mutex_);
  std::map<std::uintptr_t, std::pair<const PhysicalHandle, Physical>*> pages;
  for (auto& page : physical_) {
    const std::uintptr_t at = page.second.mapped_at;
    if (page.second.device == device && at >= address && at < address + bytes && !page.second.is_stale) pages[at] = &page;
  }
  std::uintptr_t next = address;
  std::size_t size = 0;
  for (const auto& [at, page] : pages) {
    if (size == 0) size = page->second.bytes;
    if (at != next || page->second.bytes != size) break;
    next += size;
  }
  if (bytes == 0 || next != address + bytes) {
    return {StatusCode::kInvalidArgument,
            "export_mapped(" + hex(address) + ", bytes=" + std::to_string(bytes) + "): not whole mapped pages"};
  }
  std::vector<SharedPage> shared;
  for (const auto& [at, page] : pages) {
    SharedPage& known = page->second.shared;
    if (known.fd < 0) {
      int fd = -1;
      MYBACKEND_CALL(physical_export, std::to_string(page->first), &fd, page->first, cuda::kPosixFileDescriptor, 0);
      static std::atomic<std::uint64_t> serial{0};
      known = {++serial, fd};
    }
    shared.push_back(known);
  }
  *out = std::move(shared);
  *page_bytes = size;
  return {};
}

Status CudaDriver::import_mapped(int device, const std::vector<int>& fds, std::size_t page_bytes, void** out) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  void* range = nullptr;
  if (Status status = address_reserve(device, fds.size() * page_bytes, &range); !status.ok()) return status;
  Status status;
  for (std::size_t page = 0; page < fds.size() && status.ok(); ++page) {
    status = [&]() -> Status {
      MYBACKEND_ON_DEVICE(device);
      cuda::MemoryHandle handle = 0;
      MYBACKEND_CALL(physical_import, "fd=" + std::to_string(fds[page]), &handle,
                     reinterpret_cast<void*>(static_cast<std::intptr_t>(fds[page])), cuda::kPosixFileDescriptor);
      {
        std::unique_lock lock(ranges_mutex_);
        physical_[handle] = {page_bytes, device, 0};
      }
      Status mapped = memory_map(device, static_cast<char*>(range) + page * page_bytes, handle);
      if (!mapped.ok()) (void)physical_release(device, handle);
      return mapped;
    }();
  }
  if (!status.ok()) {
    (void)unmap_imported(device, range);
    return status;
  }
  *out = range;
  return {};
}

Status CudaDriver::unmap_imported(int device, void* ptr) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::vector<std::pair<PhysicalHandle, std::uintptr_t>> pages;
  std::size_t bytes = 0;
  {
    std::shared_lock lock(ranges_mutex_);
    const auto range = ranges_.find(address);
    if (range == ranges_.end() || range->second.kind != RangeKind::kReserved || range->second.device != device) {
      return {StatusCode::kInvalidArgument, "unmap_imported(" + hex(address) + "): not an imported range"};
    }
    bytes = range->second.bytes;
    for (const auto& [handle, physical] : physical_) {
      if (physical.mapped_at >= address && physical.mapped_at < address + bytes) pages.emplace_back(handle, physical.mapped_at);
    }
  }
  Status first_failure;
  for (const auto& [handle, at] : pages) {
    Status status = memory_unmap(device, reinterpret_cast<void*>(at), handle);
    if (status.ok()) status = physical_release(device, handle);
    if (!status.ok() && first_failure.ok()) first_failure = status;
  }
  return first_failure.ok() ? address_free(device, ptr, bytes) : first_failure;
}

Status CudaDriver::allow_access(int owner, int accessor) noexcept {
  for (int device : {owner, accessor}) {
    if (Status status = check_device(device); !status.ok()) return status;
  }
  if (owner == accessor) return {};
  OnDevice on_device(*this, owner);
  if (!on_device.ok()) return on_device.status();
  std::unique_lock lock(ranges_mutex_);
  std::vector<int>& accessors = devices_[static_cast<std::size_t>(owner)]->accessors;
  if (std::find(accessors.begin(), accessors.end(), accessor) != accessors.end()) return {};
  for (const auto& [handle, physical] : physical_) {
    if (physical.device != owner || physical.mapped_at == 0 || physical.is_stale) continue;
    if (Status status = set_access(owner, physical.mapped_at, physical.bytes, accessor); !status.ok()) return status;
  }
  accessors.push_back(accessor);
  return {};
}

Status CudaDriver::host_register(void* ptr, std::size_t bytes) noexcept {
  constexpr int device = 0;  // any: it holds for all
  constexpr unsigned kPortable = 1;
  MYBACKEND_ON_DEVICE(device);
  RelaxedCapture relaxed(api_);
  MYBACKEND_CALL(host_register, hex(ptr) + ", bytes=" + std::to_string(bytes), ptr, bytes, kPortable);
  return {};
}

Status CudaDriver::host_unregister(void* ptr) noexcept {
  constexpr int device = 0;
  MYBACKEND_ON_DEVICE(device);
  RelaxedCapture relaxed(api_);
  MYBACKEND_CALL(host_unregister, hex(ptr), ptr);
  return {};
}

}  // namespace mybackend
