#include "driver/cuda/cuda_driver.h"

#include <unistd.h>

#include <algorithm>

#include "driver/cuda/cuda_driver_internal.h"

namespace mybackend {

Status CudaDriver::failure(const char* member, const std::string& arguments, int device, Result result) const {
  const StatusCode code = result == cuda::kNoMemory             ? StatusCode::kOutOfMemory
                          : result == cuda::kNotReadyResult     ? StatusCode::kNotReady
                          : result == cuda::kInvalidValue       ? StatusCode::kInvalidArgument
                          : result == cuda::kNotSupportedResult ? StatusCode::kNotSupported
                                                                : StatusCode::kFailed;
  if (code == StatusCode::kNotReady) return {code, ""};
  std::string text = std::string(api_.symbol(member)) + "(" + arguments + ")";
  if (device >= 0) text += " on device " + std::to_string(device);
  text += ": " + api_.error_text(result);
  if (result == cuda::kDeinitialized || result == cuda::kInvalidContext || result == cuda::kContextIsDestroyed) {
    text += "; the device's context is gone: the process is ending, or another library has reset the device";
  }
  return {code, std::move(text)};
}

CudaDriver::CudaDriver(Api api) : api_(std::move(api)) {}

Status CudaDriver::create(cuda::Vendor vendor, std::unique_ptr<CudaDriver>* out) {
  Api api;
  if (Status status = Api::load(vendor, &api); !status.ok()) return status;
  std::unique_ptr<CudaDriver> driver(new CudaDriver(std::move(api)));
  if (Status status = driver->start(); !status.ok()) return status;
  *out = std::move(driver);
  return {};
}

Status CudaDriver::start() {
  constexpr int device = -1;
  task_errors_ = std::make_shared<TaskErrors>();
  if (Result result = api_.init(0); result != cuda::kSuccess) {
    return {StatusCode::kNotSupported, api_.library + " found no usable device: " + failure("init", "0", -1, result).message()};
  }
  int count = 0;
  MYBACKEND_CALL(device_get_count, "", &count);
  if (count < 1) return {StatusCode::kNotSupported, api_.library + " found no device: " + api_.symbol("device_get_count") + " gave 0"};
  for (int i = 0; i < count; ++i) {
    auto d = std::make_unique<Device>();
    const std::string index = std::to_string(i);
    MYBACKEND_CALL(device_get, index, &d->ordinal, i);
    char name[128] = "";
    MYBACKEND_CALL(device_get_name, index, name, sizeof(name), d->ordinal);
    d->name = name;
    MYBACKEND_CALL(device_total_memory, index, &d->total_bytes, d->ordinal);
    if (api_.vendor == cuda::Vendor::kCuda) {
      // HIP numbers its attributes differently; what they would tell is not needed there.
      int value = 0;
      MYBACKEND_CALL(device_get_attribute, "MULTIPROCESSOR_COUNT, " + index, &d->multi_processor_count, cuda::kMultiprocessorCount,
                     d->ordinal);
      d->rdma = api_.device_get_attribute(&value, cuda::kGpuDirectRdmaSupported, d->ordinal) == cuda::kSuccess && value != 0;
      d->exports = api_.device_get_attribute(&value, cuda::kPosixHandlesSupported, d->ordinal) == cuda::kSuccess && value != 0;
    }
    int virtual_memory = 1;
    if (api_.vendor == cuda::Vendor::kCuda &&
        api_.device_get_attribute(&virtual_memory, cuda::kVirtualMemorySupported, d->ordinal) != cuda::kSuccess) {
      virtual_memory = 0;
    }
    const cuda::AllocationProperties properties = d->properties();
    std::size_t granularity = 0;
    if (virtual_memory != 0 && api_.memory_granularity(&granularity, &properties, 0) == cuda::kSuccess) d->page_bytes = granularity;
    devices_.push_back(std::move(d));
  }
  return {};
}

CudaDriver::~CudaDriver() {
  for (auto& d : devices_) {
    if (d->context != nullptr) (void)api_.primary_context_release(d->ordinal);
  }
}

Status CudaDriver::check_device(int device) const {
  if (device >= 0 && device < device_count()) return {};
  return {StatusCode::kInvalidArgument,
          "device " + std::to_string(device) + " does not exist; there are " + std::to_string(device_count())};
}

Status CudaDriver::device_info(int device, DeviceInfo* out) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  const Device& d = *devices_[static_cast<std::size_t>(device)];
  *out = {d.name.c_str(), d.total_bytes, d.page_bytes, d.multi_processor_count};
  return {};
}

// --- Memory -----------------------------------------------------------------------------------

Status CudaDriver::memory_info(int device, MemoryInfo* out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MemoryInfo info;
  MYBACKEND_CALL(memory_get_info, "", &info.free_bytes, &info.total_bytes);
  *out = info;
  return {};
}

Status CudaDriver::memory_allocate(int device, std::size_t bytes, void** out) noexcept {
  if (bytes == 0) return {StatusCode::kInvalidArgument, "memory_allocate: 0 bytes"};
  MYBACKEND_ON_DEVICE(device);
  RelaxedCapture relaxed(api_);
  cuda::DevicePtr ptr = 0;
  MYBACKEND_CALL(memory_allocate, "bytes=" + std::to_string(bytes), &ptr, bytes);
  std::unique_lock lock(ranges_mutex_);
  ranges_[static_cast<std::uintptr_t>(ptr)] = {bytes, device, RangeKind::kAllocated};
  *out = reinterpret_cast<void*>(static_cast<std::uintptr_t>(ptr));
  return {};
}

Status CudaDriver::memory_free(int device, void* ptr) noexcept {
  MYBACKEND_ON_DEVICE(device);
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  {
    std::shared_lock lock(ranges_mutex_);
    const auto found = ranges_.find(address);
    if (found == ranges_.end() || found->second.kind != RangeKind::kAllocated || found->second.device != device) {
      return {StatusCode::kInvalidArgument,
              "memory_free(" + hex(address) + ") on device " + std::to_string(device) + ": not allocated there, or freed before"};
    }
  }
  RelaxedCapture relaxed(api_);
  MYBACKEND_CALL(memory_free, hex(address), address);
  std::unique_lock lock(ranges_mutex_);
  ranges_.erase(address);
  return {};
}

Status CudaDriver::address_reserve(int device, std::size_t bytes, void** out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  const std::size_t page_bytes = devices_[static_cast<std::size_t>(device)]->page_bytes;
  if (page_bytes == 0) {
    return {StatusCode::kNotSupported, "device " + std::to_string(device) + " has no virtual memory management"};
  }
  if (bytes == 0 || bytes % page_bytes != 0) {
    return {StatusCode::kInvalidArgument,
            "address_reserve: " + std::to_string(bytes) + " bytes are not whole pages of " + std::to_string(page_bytes)};
  }
  cuda::DevicePtr ptr = 0;
  MYBACKEND_CALL(address_reserve, "bytes=" + std::to_string(bytes), &ptr, bytes, 0, 0, 0);
  std::unique_lock lock(ranges_mutex_);
  ranges_[static_cast<std::uintptr_t>(ptr)] = {bytes, device, RangeKind::kReserved};
  *out = reinterpret_cast<void*>(static_cast<std::uintptr_t>(ptr));
  return {};
}

Status CudaDriver::address_free(int device, void* ptr, std::size_t bytes) noexcept {
  MYBACKEND_ON_DEVICE(device);
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  {
    std::shared_lock lock(ranges_mutex_);
    const auto found = ranges_.find(address);
    const bool is_range = found != ranges_.end() && found->second.kind == RangeKind::kReserved && found->second.bytes == bytes;
    const bool is_mapped = std::any_of(physical_.begin(), physical_.end(), [&](const auto& entry) {
      return entry.second.mapped_at >= address && entry.second.mapped_at < address + bytes;
    });
    if (!is_range || is_mapped) {
      return {StatusCode::kInvalidArgument, "address_free(" + hex(address) + ", " + std::to_string(bytes) +
                                                "): " + (is_mapped ? "memory is mapped there" : "not a reserved range")};
    }
  }
  MYBACKEND_CALL(address_free, hex(address) + ", bytes=" + std::to_string(bytes), address, bytes);
  std::unique_lock lock(ranges_mutex_);
  ranges_.erase(address);
  return {};
}

Status CudaDriver::physical_create(int device, std::size_t bytes, PhysicalHandle* out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  const Device& d = *devices_[static_cast<std::size_t>(device)];
  if (d.page_bytes == 0) return {StatusCode::kNotSupported, "device " + std::to_string(device) + " has no virtual memory management"};
  if (bytes == 0 || bytes % d.page_bytes != 0) {
    return {StatusCode::kInvalidArgument,
            "physical_create: " + std::to_string(bytes) + " bytes are not whole pages of " + std::to_string(d.page_bytes)};
  }
  const cuda::AllocationProperties properties = d.properties();
  cuda::MemoryHandle handle = 0;
  MYBACKEND_CALL(physical_create, "bytes=" + std::to_string(bytes), &handle, bytes, &properties, 0);
  std::unique_lock lock(ranges_mutex_);
  physical_[handle] = {bytes, device, 0};
  *out = handle;
  return {};
}

Status CudaDriver::physical_release(int device, PhysicalHandle handle) noexcept {
  MYBACKEND_ON_DEVICE(device);
  {
    std::shared_lock lock(ranges_mutex_);
    const auto found = physical_.find(handle);
    if (found == physical_.end() || found->second.device != device || (found->second.mapped_at != 0 && !found->second.is_stale)) {
      return {StatusCode::kInvalidArgument, "physical_release(" + std::to_string(handle) + "): unknown, or mapped"};
    }
  }
  if (Status status = unmap_stale(handle, device); !status.ok()) return status;
  MYBACKEND_CALL(physical_release, std::to_string(handle), handle);
  std::unique_lock lock(ranges_mutex_);
  const auto released = physical_.extract(handle);
  if (released.mapped().shared.fd >= 0) close(released.mapped().shared.fd);
  return {};
}

// Of the handle, if it has one.
Status CudaDriver::unmap_stale(PhysicalHandle handle, int device) {
  Physical physical;
  {
    std::shared_lock lock(ranges_mutex_);
    physical = physical_.at(handle);
  }
  if (!physical.is_stale) return {};
  MYBACKEND_CALL(memory_unmap, hex(physical.mapped_at) + ", bytes=" + std::to_string(physical.bytes), physical.mapped_at, physical.bytes);
  std::unique_lock lock(ranges_mutex_);
  physical_[handle] = {physical.bytes, physical.device, 0};
  --stale_count_;
  return {};
}

Status CudaDriver::memory_map(int device, void* ptr, PhysicalHandle handle) noexcept {
  MYBACKEND_ON_DEVICE(device);
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::size_t bytes = 0;
  {
    std::shared_lock lock(ranges_mutex_);
    const auto found = physical_.find(handle);
    if (found == physical_.end() || found->second.device != device || found->second.mapped_at != 0) {
      return {StatusCode::kInvalidArgument, "memory_map: handle " + std::to_string(handle) + " is unknown, or mapped"};
    }
    bytes = found->second.bytes;
    auto range = ranges_.upper_bound(address);
    const bool inside = range != ranges_.begin() && (--range)->second.kind == RangeKind::kReserved && address >= range->first &&
                        address + bytes <= range->first + range->second.bytes;
    if (!inside) return {StatusCode::kInvalidArgument, "memory_map(" + hex(address) + "): not in a reserved range"};
  }
  std::vector<PhysicalHandle> in_the_way;
  {
    std::shared_lock lock(ranges_mutex_);
    if (stale_count_ > 0) {
      for (const auto& [other, physical] : physical_) {
        if (physical.is_stale && physical.mapped_at < address + bytes && address < physical.mapped_at + physical.bytes)
          in_the_way.push_back(other);
      }
    }
  }
  for (PhysicalHandle other : in_the_way) {
    if (Status status = unmap_stale(other, device); !status.ok()) return status;
  }
  const std::string arguments = hex(address) + ", bytes=" + std::to_string(bytes);
  MYBACKEND_CALL(memory_map, arguments, address, bytes, 0, handle, 0);
  std::vector<int> accessors = {device};
  {
    std::shared_lock lock(ranges_mutex_);
    const std::vector<int>& others = devices_[static_cast<std::size_t>(device)]->accessors;
    accessors.insert(accessors.end(), others.begin(), others.end());
  }
  for (int accessor : accessors) {
    const Status status = set_access(device, address, bytes, accessor);
    if (status.ok()) continue;
    if (api_.memory_unmap(address, bytes) != cuda::kSuccess) {
      std::unique_lock lock(ranges_mutex_);
      Physical& left = physical_[handle];
      left.mapped_at = address;
      left.is_stale = true;
      ++stale_count_;
    }
    return status;
  }
  std::unique_lock lock(ranges_mutex_);
  physical_[handle].mapped_at = address;
  return {};
}

Status CudaDriver::set_access(int device, std::uintptr_t address, std::size_t bytes, int accessor) {
  cuda::AccessDescription access;
  access.location.id = devices_[static_cast<std::size_t>(accessor)]->ordinal;
  MYBACKEND_CALL(memory_set_access, hex(address) + ", bytes=" + std::to_string(bytes) + ", for device " + std::to_string(accessor), address,
                 bytes, &access, 1);
  return {};
}

Status CudaDriver::memory_unmap(int device, void* ptr, PhysicalHandle handle) noexcept {
  MYBACKEND_ON_DEVICE(device);
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::size_t bytes = 0;
  {
    std::shared_lock lock(ranges_mutex_);
    const auto found = physical_.find(handle);
    if (found == physical_.end() || address == 0 || found->second.mapped_at != address) {
      return {StatusCode::kInvalidArgument,
              "memory_unmap(" + hex(address) + "): handle " + std::to_string(handle) + " is not mapped there"};
    }
    bytes = found->second.bytes;
  }
  MYBACKEND_CALL(memory_unmap, hex(address) + ", bytes=" + std::to_string(bytes), address, bytes);
  std::unique_lock lock(ranges_mutex_);
  physical_[handle].mapped_at = 0;
  return {};
}

int CudaDriver::device_of(const void* ptr) const noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::shared_lock lock(ranges_mutex_);
  auto range = ranges_.upper_bound(address);
  if (range == ranges_.begin()) return -1;
  --range;
  return address - range->first < range->second.bytes ? range->second.device : -1;
}

}  // namespace mybackend
