#include "driver/cuda/cuda_driver.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>

namespace mybackend {

using cuda::Api;
using cuda::Result;

struct CudaDriver::Device {
  cuda::DeviceOrdinal ordinal = 0;
  std::string name;
  std::size_t total_bytes = 0;
  std::size_t page_bytes = 0;  // 0: no virtual memory
  int multi_processor_count = 0;
  std::vector<int> accessors;  // other devices that may use what is mapped here; under ranges_mutex_
  bool rdma = false;
  bool exports = false;
  std::once_flag retained;
  cuda::ContextPtr context = nullptr;
  Result context_result = cuda::kSuccess;

  cuda::AllocationProperties properties() const {
    cuda::AllocationProperties p;
    p.location.id = ordinal;
    p.flags.gpu_direct_rdma_capable = rdma;
    if (exports) p.requested_handle_types = cuda::kPosixFileDescriptor;
    return p;
  }
};

// What tasks threw, by stream. Shared with the tasks: they may run when the driver object is gone.
struct CudaDriver::TaskErrors {
  std::mutex mutex;
  std::unordered_map<StreamHandle, std::string> messages;
};

namespace {

std::string hex(std::uintptr_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%zx", static_cast<std::size_t>(value));
  return text;
}
std::string hex(const void* value) {
  return hex(reinterpret_cast<std::uintptr_t>(value));
}
cuda::StreamPtr stream_ptr(StreamHandle stream) {
  return reinterpret_cast<cuda::StreamPtr>(static_cast<std::uintptr_t>(stream));
}
cuda::EventPtr event_ptr(EventHandle event) {
  return reinterpret_cast<cuda::EventPtr>(static_cast<std::uintptr_t>(event));
}

// Relaxed capture mode while it lives.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Api& api) : api_(api) { (void)api_.thread_exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { (void)api_.thread_exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Api& api_;
  int mode_ = cuda::kCaptureRelaxed;
};

}  // namespace

// The device's context is current while it lives.
class CudaDriver::OnDevice {
 public:
  OnDevice(CudaDriver& driver, int device) : driver_(driver), device_(device) {
    Device& d = *driver.devices_[static_cast<std::size_t>(device)];
    std::call_once(d.retained, [&] { d.context_result = driver.api_.primary_context_retain(&d.context, d.ordinal); });
    member_ = "primary_context_retain";
    result_ = d.context_result;
    if (result_ != cuda::kSuccess) return;
    cuda::ContextPtr current = nullptr;
    member_ = "context_get_current";
    result_ = driver.api_.context_get_current(&current);
    if (result_ != cuda::kSuccess || current == d.context) return;
    member_ = "context_push_current";
    result_ = driver.api_.context_push_current(d.context);
    pushed_ = result_ == cuda::kSuccess;
  }
  ~OnDevice() {
    cuda::ContextPtr popped = nullptr;
    if (pushed_) (void)driver_.api_.context_pop_current(&popped);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  bool ok() const { return result_ == cuda::kSuccess; }
  Status status() const { return driver_.failure(member_, "", device_, result_); }

 private:
  CudaDriver& driver_;
  const int device_;
  const char* member_ = "";
  Result result_ = cuda::kSuccess;
  bool pushed_ = false;
};

// Makes `device` current or returns; then calls `member` and returns its failure.
#define MYBACKEND_ON_DEVICE(device)                                      \
  if (Status status = check_device(device); !status.ok()) return status; \
  OnDevice on_device(*this, device);                                     \
  if (!on_device.ok()) return on_device.status()
#define MYBACKEND_CALL(member, text, ...) \
  if (Result result = api_.member(__VA_ARGS__); result != cuda::kSuccess) return failure(#member, text, device, result)

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

// --- Mapped memory of several processes and devices ---------------------------------------------

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

// --- Streams ----------------------------------------------------------------------------------

Status CudaDriver::stream_create(int device, int priority, StreamHandle* out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  int least = 0, greatest = 0;
  MYBACKEND_CALL(stream_priority_range, "", &least, &greatest);
  cuda::StreamPtr stream = nullptr;
  MYBACKEND_CALL(stream_create, "priority=" + std::to_string(priority), &stream, cuda::kStreamNonBlocking,
                 std::clamp(priority, greatest, least));
  *out = reinterpret_cast<std::uintptr_t>(stream);
  return {};
}

Status CudaDriver::take_task_error(StreamHandle stream) {
  std::lock_guard lock(task_errors_->mutex);
  auto found = task_errors_->messages.find(stream);
  if (found == task_errors_->messages.end()) return {};
  Status status(StatusCode::kFailed, std::move(found->second));
  task_errors_->messages.erase(found);
  return status;
}

Status CudaDriver::stream_query(int device, StreamHandle stream) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CALL(stream_query, hex(stream), stream_ptr(stream));
  return take_task_error(stream);
}

Status CudaDriver::stream_synchronize(int device, StreamHandle stream) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CALL(stream_synchronize, hex(stream), stream_ptr(stream));
  return take_task_error(stream);
}

Status CudaDriver::device_synchronize(int device) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CALL(context_synchronize, "");
  return {};
}

Status CudaDriver::stream_enqueue(int device, StreamHandle stream, const char* name, std::function<void()> task) noexcept {
  MYBACKEND_ON_DEVICE(device);
  struct Task {
    std::function<void()> run;
    std::string name;
    StreamHandle stream;
    std::shared_ptr<TaskErrors> errors;
  };
  auto owned = std::make_unique<Task>(Task{std::move(task), name, stream, task_errors_});
  const auto run = [](void* data) {
    std::unique_ptr<Task> t(static_cast<Task*>(data));
    std::string message;
    try {
      return t->run();
    } catch (const std::exception& error) {
      message = error.what();
    } catch (...) {
      message = "an exception that is not a std::exception";
    }
    std::lock_guard lock(t->errors->mutex);
    t->errors->messages.try_emplace(t->stream, t->name + ": " + message);
  };
  MYBACKEND_CALL(launch_host_function, hex(stream) + ", " + name, stream_ptr(stream), run, owned.get());
  (void)owned.release();
  return {};
}

Status CudaDriver::copy_async(int device, StreamHandle stream, void* dst, const void* src, std::size_t bytes) noexcept {
  MYBACKEND_ON_DEVICE(device);
  if (bytes == 0) return {};
  MYBACKEND_CALL(memory_copy_async, hex(dst) + ", " + hex(src) + ", bytes=" + std::to_string(bytes) + ", stream=" + hex(stream),
                 reinterpret_cast<std::uintptr_t>(dst), reinterpret_cast<std::uintptr_t>(src), bytes, stream_ptr(stream));
  return {};
}

// --- Events -----------------------------------------------------------------------------------

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

Status CudaDriver::event_create(int device, EventHandle* out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  cuda::EventPtr event = nullptr;
  MYBACKEND_CALL(event_create, "", &event, cuda::kEventDefault);
  *out = reinterpret_cast<std::uintptr_t>(event);
  std::lock_guard lock(events_mutex_);
  events_[*out] = device;
  return {};
}

// Whether the event is one of ours: a pointer that is not would take the process down.
#define MYBACKEND_CHECK_EVENT(event)                                                                     \
  {                                                                                                      \
    std::lock_guard lock(events_mutex_);                                                                 \
    if (events_.count(event) == 0) return {StatusCode::kInvalidArgument, "unknown event " + hex(event)}; \
  }

void CudaDriver::event_destroy(int device, EventHandle event) noexcept {
  {
    std::lock_guard lock(events_mutex_);
    if (events_.erase(event) == 0) return;
  }
  if (!check_device(device).ok()) return;
  OnDevice on_device(*this, device);
  if (on_device.ok()) (void)api_.event_destroy(event_ptr(event));
}

Status CudaDriver::event_record(int device, EventHandle event, StreamHandle stream) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CHECK_EVENT(event);
  MYBACKEND_CALL(event_record, hex(event) + ", stream=" + hex(stream), event_ptr(event), stream_ptr(stream));
  return {};
}

Status CudaDriver::event_query(int device, EventHandle event) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CHECK_EVENT(event);
  MYBACKEND_CALL(event_query, hex(event), event_ptr(event));
  return {};
}

Status CudaDriver::event_synchronize(int device, EventHandle event) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CHECK_EVENT(event);
  MYBACKEND_CALL(event_synchronize, hex(event), event_ptr(event));
  return {};
}

Status CudaDriver::stream_wait_event(int device, StreamHandle stream, EventHandle event) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CHECK_EVENT(event);
  MYBACKEND_CALL(stream_wait_event, hex(stream) + ", event=" + hex(event), stream_ptr(stream), event_ptr(event), 0);
  return {};
}

Status CudaDriver::event_elapsed_ns(EventHandle start, EventHandle end, std::int64_t* out) noexcept {
  MYBACKEND_CHECK_EVENT(start);
  MYBACKEND_CHECK_EVENT(end);
  constexpr int device = -1;
  float ms = 0;
  MYBACKEND_CALL(event_elapsed_ms, hex(start) + ", " + hex(end), &ms, event_ptr(start), event_ptr(end));
  *out = static_cast<std::int64_t>(static_cast<double>(ms) * 1e6);
  return {};
}

// The child may still ask whose memory something is.
// --- Stream captures --------------------------------------------------------------------------

Status CudaDriver::capture_mark(int device, StreamHandle stream, CaptureMarker* out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  const std::string name = "stream=" + hex(stream);
  int status = cuda::kCaptureNone;
  cuda::GraphPtr graph = nullptr;
  const cuda::NodePtr* frontier = nullptr;
  std::size_t count = 0;
  MYBACKEND_CALL(stream_capture_info, name, stream_ptr(stream), &status, nullptr, &graph, &frontier, &count);
  if (status != cuda::kCaptureActive) return {StatusCode::kNotReady, ""};
  cuda::NodePtr node = nullptr;
  MYBACKEND_CALL(graph_add_empty_node, name, &node, graph, frontier, count);
  MYBACKEND_CALL(stream_update_capture, name, stream_ptr(stream), &node, 1, cuda::kSetDependencies);
  *out = reinterpret_cast<std::uintptr_t>(node);
  return {};
}

Status CudaDriver::capture_passed(int device, StreamHandle stream, const std::vector<CaptureMarker>& markers,
                                  std::vector<bool>* out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  int status = cuda::kCaptureNone;
  const cuda::NodePtr* frontier = nullptr;
  std::size_t count = 0;
  MYBACKEND_CALL(stream_capture_info, "stream=" + hex(stream), stream_ptr(stream), &status, nullptr, nullptr, &frontier, &count);
  if (status != cuda::kCaptureActive) return {StatusCode::kNotReady, ""};
  // What the frontier depends on, until all markers are found.
  std::unordered_set<CaptureMarker> wanted(markers.begin(), markers.end()), found;
  std::unordered_set<cuda::NodePtr> seen;
  std::vector<cuda::NodePtr> open(frontier, frontier + count);
  while (!open.empty() && found.size() < wanted.size()) {
    const cuda::NodePtr node = open.back();
    open.pop_back();
    if (!seen.insert(node).second) continue;
    if (const auto marker = static_cast<CaptureMarker>(reinterpret_cast<std::uintptr_t>(node)); wanted.count(marker) != 0)
      found.insert(marker);
    std::size_t dependency_count = 0;
    MYBACKEND_CALL(graph_node_dependencies, hex(node), node, nullptr, &dependency_count);
    if (dependency_count == 0) continue;
    const std::size_t old = open.size();
    open.resize(old + dependency_count);
    MYBACKEND_CALL(graph_node_dependencies, hex(node), node, open.data() + old, &dependency_count);
    open.resize(old + dependency_count);
  }
  out->clear();
  for (CaptureMarker marker : markers) out->push_back(found.count(marker) != 0);
  return {};
}

Status CudaDriver::prepare_fork() noexcept {
  ranges_mutex_.lock();
  events_mutex_.lock();
  return {StatusCode::kNotSupported, "a child process cannot use its parent's GPU state"};
}

void CudaDriver::after_fork_in_parent() noexcept {
  events_mutex_.unlock();
  ranges_mutex_.unlock();
}

void CudaDriver::after_fork_in_child() noexcept {
  events_mutex_.unlock();
  // It knows its writer by a thread number, which is another one here: it cannot be unlocked.
  new (&ranges_mutex_) std::shared_mutex();
}

#undef MYBACKEND_ON_DEVICE
#undef MYBACKEND_CALL
#undef MYBACKEND_CHECK_EVENT

}  // namespace mybackend
