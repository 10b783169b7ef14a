#include "driver/sim/sim_driver.h"

#include "base/machine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

namespace mybackend {
namespace {

Status bad(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}

// Gives the pages of a range back to the system and makes touching them a fault.
bool make_inaccessible(void* ptr, std::size_t bytes) {
  return mmap(ptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

bool make_usable(void* ptr, std::size_t bytes) {
  if (mprotect(ptr, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  madvise(ptr, bytes, MADV_HUGEPAGE);  // advice: nothing depends on it
  return true;
}

}  // namespace

struct SimDriver::Device {
  std::mutex mutex;  // guards everything below but the streams' own state
  std::uintptr_t range_begin = 0;
  std::uintptr_t range_end = 0;
  void* mapping = nullptr;
  std::size_t mapping_bytes = 0;
  std::size_t capacity_bytes = 0;
  std::size_t used_bytes = 0;
  std::map<std::uintptr_t, std::size_t> free_ranges;
  std::map<std::uintptr_t, std::size_t> allocations;
  std::map<std::uintptr_t, std::size_t> reservations;
  std::unordered_map<PhysicalHandle, std::size_t> physicals;
  std::map<std::uintptr_t, PhysicalHandle> mapped;
  PhysicalHandle next_physical = 1;
  std::atomic<std::int64_t> queued{0};  // tasks in all streams
  std::map<StreamHandle, std::unique_ptr<SimStream>> streams;

  // First fit in address order. 0 when no hole is large enough.
  std::uintptr_t take_range(std::size_t bytes) {
    for (auto it = free_ranges.begin(); it != free_ranges.end(); ++it) {
      if (it->second < bytes) continue;
      const auto [address, size] = *it;
      free_ranges.erase(it);
      if (size > bytes) free_ranges.emplace(address + bytes, size - bytes);
      return address;
    }
    return 0;
  }

  void give_range(std::uintptr_t address, std::size_t bytes) {
    auto next = free_ranges.lower_bound(address);
    if (next != free_ranges.end() && address + bytes == next->first) {
      bytes += next->second;
      next = free_ranges.erase(next);
    }
    if (next != free_ranges.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == address) {
        previous->second += bytes;
        return;
      }
    }
    free_ranges.emplace(address, bytes);
  }
};

SimDriver::SimDriver(const SimOptions& options) : options_(options) {}

Status SimDriver::create(const SimOptions& options, std::unique_ptr<SimDriver>* out) {
  if (options.device_count < 1 || options.device_count > 64) {
    return bad("sim driver: device_count must lie in 1..64, not " + std::to_string(options.device_count));
  }
  std::size_t capacity = options.capacity_bytes;
  if (capacity == 0) capacity = machine_memory_bytes() / 5 * 4;
  capacity = std::max(capacity / kPageBytes * kPageBytes, kPageBytes);
  auto driver = std::unique_ptr<SimDriver>(new SimDriver(options));
  for (int index = 0; index < options.device_count; ++index) {
    auto device = std::make_unique<Device>();
    device->capacity_bytes = capacity;
    // Expandable segments reserve 1.125 x the capacity each: leave address space for many.
    // Where the process has a limit on address space, fewer fit.
    for (std::size_t factor = 64; factor >= 1 && device->mapping == nullptr; factor /= 2) {
      if (capacity > (std::size_t{1} << 45) / factor) continue;
      const std::size_t bytes = capacity * factor + kPageBytes;
      void* mapping = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (mapping == MAP_FAILED) continue;
      device->mapping = mapping;
      device->mapping_bytes = bytes;
    }
    if (device->mapping == nullptr) {
      return {StatusCode::kOutOfMemory,
              "sim driver: cannot reserve an address range of " + std::to_string(capacity) + " bytes: " + std::strerror(errno)};
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(device->mapping);
    device->range_begin = round_up(begin, kPageBytes);
    device->range_end = (begin + device->mapping_bytes) / kPageBytes * kPageBytes;
    device->free_ranges.emplace(device->range_begin, device->range_end - device->range_begin);
    device->streams.emplace(kDefaultStream, std::make_unique<SimStream>(0, &device->queued));
    driver->devices_.push_back(std::move(device));
  }
  *out = std::move(driver);
  return {};
}

SimDriver::~SimDriver() {
  for (auto& device : devices_) {
    device->streams.clear();
    if (device->mapping != nullptr) munmap(device->mapping, device->mapping_bytes);
  }
}

Status SimDriver::check_device(int device) const {
  if (device >= 0 && device < device_count()) return {};
  return bad("invalid device ordinal " + std::to_string(device) + ": there are " + std::to_string(device_count()) + " devices");
}

Status SimDriver::device_info(int device, DeviceInfo* out) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  out->name = "mybackend sim";
  out->total_bytes = devices_[device]->capacity_bytes;
  out->page_bytes = kPageBytes;
  out->multi_processor_count = static_cast<int>(std::thread::hardware_concurrency());
  return {};
}

// --- Memory ---------------------------------------------------------------------------------

Status SimDriver::memory_info(int device, MemoryInfo* out) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  out->total_bytes = d.capacity_bytes;
  out->free_bytes = d.capacity_bytes - d.used_bytes;
  return {};
}

Status SimDriver::memory_allocate(int device, std::size_t bytes, void** out) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  if (Status fault = faults_.check(Primitive::kMemoryAllocate); !fault.ok()) return fault;
  if (bytes == 0) return bad("memory_allocate: 0 bytes");
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  if (bytes > d.capacity_bytes || round_up(bytes, kPageBytes) > d.capacity_bytes - d.used_bytes) {
    return {StatusCode::kOutOfMemory,
            "memory_allocate: " + std::to_string(bytes) + " bytes asked, " + std::to_string(d.capacity_bytes - d.used_bytes) + " free"};
  }
  const std::size_t rounded = round_up(bytes, kPageBytes);
  const std::uintptr_t address = d.take_range(rounded);
  if (address == 0) return {StatusCode::kOutOfMemory, "memory_allocate: the address range is used up"};
  void* ptr = reinterpret_cast<void*>(address);
  if (!make_usable(ptr, rounded)) {
    const int error = errno;
    d.give_range(address, rounded);
    return {StatusCode::kOutOfMemory, std::string("memory_allocate: mprotect: ") + std::strerror(error)};
  }
  d.allocations.emplace(address, rounded);
  d.used_bytes += rounded;
  *out = ptr;
  return {};
}

Status SimDriver::memory_free(int device, void* ptr) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  if (Status fault = faults_.check(Primitive::kMemoryFree); !fault.ok()) return fault;
  (void)device_synchronize(device);  // a task's error stays with whoever synchronizes next
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  auto found = d.allocations.find(address);
  if (found == d.allocations.end()) return bad("memory_free: not an allocation of this device");
  const std::size_t bytes = found->second;
  if (!make_inaccessible(ptr, bytes)) return {StatusCode::kFailed, std::string("memory_free: mmap: ") + std::strerror(errno)};
  d.allocations.erase(found);
  d.give_range(address, bytes);
  d.used_bytes -= bytes;
  return {};
}

Status SimDriver::address_reserve(int device, std::size_t bytes, void** out) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  if (Status fault = faults_.check(Primitive::kAddressReserve); !fault.ok()) return fault;
  if (bytes == 0 || bytes % kPageBytes != 0) return bad("address_reserve: not a multiple of the page");
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  const std::uintptr_t address = d.take_range(bytes);
  if (address == 0) return {StatusCode::kOutOfMemory, "address_reserve: the address range is used up"};
  d.reservations.emplace(address, bytes);
  *out = reinterpret_cast<void*>(address);
  return {};
}

Status SimDriver::address_free(int device, void* ptr, std::size_t bytes) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  auto found = d.reservations.find(address);
  if (found == d.reservations.end() || found->second != bytes) return bad("address_free: not a reserved range");
  auto inside = d.mapped.lower_bound(address);
  if (inside != d.mapped.end() && inside->first < address + bytes) return bad("address_free: pages are still mapped");
  d.reservations.erase(found);
  d.give_range(address, bytes);
  return {};
}

Status SimDriver::physical_create(int device, std::size_t bytes, PhysicalHandle* out) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  if (Status fault = faults_.check(Primitive::kPhysicalCreate); !fault.ok()) return fault;
  if (bytes == 0 || bytes % kPageBytes != 0) return bad("physical_create: not a multiple of the page");
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  if (bytes > d.capacity_bytes - d.used_bytes) {
    return {StatusCode::kOutOfMemory,
            "physical_create: " + std::to_string(bytes) + " bytes asked, " + std::to_string(d.capacity_bytes - d.used_bytes) + " free"};
  }
  *out = d.next_physical++;
  d.physicals.emplace(*out, bytes);
  d.used_bytes += bytes;
  return {};
}

Status SimDriver::physical_release(int device, PhysicalHandle handle) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  auto found = d.physicals.find(handle);
  if (found == d.physicals.end()) return bad("physical_release: unknown handle");
  d.used_bytes -= found->second;
  d.physicals.erase(found);
  return {};
}

Status SimDriver::memory_map(int device, void* ptr, PhysicalHandle handle) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  if (Status fault = faults_.check(Primitive::kMemoryMap); !fault.ok()) return fault;
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  auto physical = d.physicals.find(handle);
  if (physical == d.physicals.end()) return bad("memory_map: unknown handle");
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  auto reservation = d.reservations.upper_bound(address);
  if (reservation == d.reservations.begin()) return bad("memory_map: not in a reserved range");
  --reservation;
  if (address + physical->second > reservation->first + reservation->second) {
    return bad("memory_map: not in a reserved range");
  }
  auto next = d.mapped.lower_bound(address);
  if (next != d.mapped.end() && next->first < address + physical->second) return bad("memory_map: already mapped");
  if (!make_usable(ptr, physical->second)) {
    return {StatusCode::kOutOfMemory, std::string("memory_map: mprotect: ") + std::strerror(errno)};
  }
  d.mapped.emplace(address, handle);
  return {};
}

Status SimDriver::memory_unmap(int device, void* ptr, PhysicalHandle handle) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  if (Status fault = faults_.check(Primitive::kMemoryUnmap); !fault.ok()) return fault;
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  auto found = d.mapped.find(reinterpret_cast<std::uintptr_t>(ptr));
  auto physical = d.physicals.find(handle);
  if (found == d.mapped.end() || found->second != handle || physical == d.physicals.end()) {
    return bad("memory_unmap: not a mapping of this handle");
  }
  if (!make_inaccessible(ptr, physical->second)) {
    return {StatusCode::kFailed, std::string("memory_unmap: mmap: ") + std::strerror(errno)};
  }
  d.mapped.erase(found);
  return {};
}

int SimDriver::device_of(const void* ptr) const noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  for (std::size_t index = 0; index < devices_.size(); ++index) {
    if (address >= devices_[index]->range_begin && address < devices_[index]->range_end) {
      return static_cast<int>(index);
    }
  }
  return -1;
}

// --- Streams --------------------------------------------------------------------------------

Status SimDriver::stream_create(int device, int priority, StreamHandle* out) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  if (Status fault = faults_.check(Primitive::kStreamCreate); !fault.ok()) return fault;
  StreamHandle handle;
  {
    std::lock_guard lock(handles_mutex_);
    handle = next_stream_++;
  }
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  d.streams.emplace(handle, std::make_unique<SimStream>(std::clamp(priority, -1, 0), &d.queued));
  *out = handle;
  return {};
}

Status SimDriver::find_stream(int device, StreamHandle stream, SimStream** out) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  resume_after_fork();
  Device& d = *devices_[device];
  std::lock_guard lock(d.mutex);
  auto found = d.streams.find(stream);
  if (found == d.streams.end()) {
    return bad("stream " + std::to_string(stream) + " is not a stream of device " + std::to_string(device));
  }
  *out = found->second.get();  // streams live as long as the driver
  return {};
}

Status SimDriver::stream_query(int device, StreamHandle stream) noexcept {
  SimStream* s = nullptr;
  if (Status status = find_stream(device, stream, &s); !status.ok()) return status;
  if (!s->idle()) return {StatusCode::kNotReady, "work is queued"};
  return s->take_error();
}

Status SimDriver::stream_synchronize(int device, StreamHandle stream) noexcept {
  if (Status fault = faults_.check(Primitive::kStreamSynchronize); !fault.ok()) return fault;
  SimStream* s = nullptr;
  if (Status status = find_stream(device, stream, &s); !status.ok()) return status;
  return s->synchronize();
}

Status SimDriver::device_synchronize(int device) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  std::vector<SimStream*> streams;
  {
    Device& d = *devices_[device];
    std::lock_guard lock(d.mutex);
    for (auto& [handle, stream] : d.streams) streams.push_back(stream.get());
  }
  Status first;
  for (SimStream* stream : streams) {
    Status status = stream->synchronize();
    if (first.ok() && !status.ok()) first = std::move(status);
  }
  return first;
}

bool SimDriver::maybe_busy(int device) const noexcept {
  return devices_[static_cast<std::size_t>(device)]->queued.load(std::memory_order_acquire) != 0;
}

Status SimDriver::stream_enqueue(int device, StreamHandle stream, const char* name, std::function<void()> task) noexcept {
  if (Status fault = faults_.check(Primitive::kStreamEnqueue); !fault.ok()) return fault;
  SimStream* s = nullptr;
  if (Status status = find_stream(device, stream, &s); !status.ok()) return status;
  return s->enqueue(name, std::move(task));
}

Status SimDriver::copy_async(int device, StreamHandle stream, void* dst, const void* src, std::size_t bytes) noexcept {
  return stream_enqueue(device, stream, "copy", [=] { std::memmove(dst, src, bytes); });
}

// --- Events ---------------------------------------------------------------------------------

Status SimDriver::event_create(int device, EventHandle* out) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  if (Status fault = faults_.check(Primitive::kEventCreate); !fault.ok()) return fault;
  std::lock_guard lock(handles_mutex_);
  std::erase_if(destroyed_events_, [](const auto& e) { return e->query(); });
  *out = next_event_++;
  events_.emplace(*out, std::make_shared<SimEvent>());
  return {};
}

void SimDriver::event_destroy(int, EventHandle event) noexcept {
  std::lock_guard lock(handles_mutex_);
  auto found = events_.find(event);
  if (found == events_.end()) return;
  // A queued task may still complete it: keep it where a fork can lock it.
  if (!found->second->query()) destroyed_events_.push_back(found->second);
  events_.erase(found);
}

Status SimDriver::find_event(EventHandle event, std::shared_ptr<SimEvent>* out) noexcept {
  resume_after_fork();
  std::lock_guard lock(handles_mutex_);
  auto found = events_.find(event);
  if (found == events_.end()) return bad("event " + std::to_string(event) + " does not exist");
  *out = found->second;
  return {};
}

Status SimDriver::event_record(int device, EventHandle event, StreamHandle stream) noexcept {
  if (Status fault = faults_.check(Primitive::kEventRecord); !fault.ok()) return fault;
  std::shared_ptr<SimEvent> e;
  if (Status status = find_event(event, &e); !status.ok()) return status;
  SimStream* s = nullptr;
  if (Status status = find_stream(device, stream, &s); !status.ok()) return status;
  const std::uint64_t version = e->begin_record();
  if (s->idle()) {  // nothing to wait for: no thread needed
    e->complete(version, options_.clock());
    return {};
  }
  Status status = s->enqueue("event_record", [e, version, clock = options_.clock] { e->complete(version, clock()); });
  if (!status.ok()) e->complete(version, options_.clock());
  return status;
}

Status SimDriver::event_query(int, EventHandle event) noexcept {
  if (Status fault = faults_.check(Primitive::kEventQuery); !fault.ok()) return fault;
  std::shared_ptr<SimEvent> e;
  if (Status status = find_event(event, &e); !status.ok()) return status;
  return e->query() ? Status() : Status(StatusCode::kNotReady, "event is not complete");
}

Status SimDriver::event_synchronize(int, EventHandle event) noexcept {
  std::shared_ptr<SimEvent> e;
  if (Status status = find_event(event, &e); !status.ok()) return status;
  e->wait(e->recorded_version());
  return {};
}

Status SimDriver::stream_wait_event(int device, StreamHandle stream, EventHandle event) noexcept {
  std::shared_ptr<SimEvent> e;
  if (Status status = find_event(event, &e); !status.ok()) return status;
  if (e->query()) return {};
  return stream_enqueue(device, stream, "stream_wait_event", [e, version = e->recorded_version()] { e->wait(version); });
}

Status SimDriver::event_elapsed_ns(EventHandle start, EventHandle end, std::int64_t* out) noexcept {
  std::shared_ptr<SimEvent> a, b;
  if (Status status = find_event(start, &a); !status.ok()) return status;
  if (Status status = find_event(end, &b); !status.ok()) return status;
  if (!a->recorded() || !b->recorded()) return bad("event_elapsed: both events must be recorded first");
  if (!a->query() || !b->query()) return {StatusCode::kNotReady, "event_elapsed: both events must be complete"};
  *out = b->completed_ns() - a->completed_ns();
  return {};
}

// --- Fork -----------------------------------------------------------------------------------

Status SimDriver::prepare_fork() noexcept {
  handles_mutex_.lock();
  for (auto& device : devices_) {
    device->mutex.lock();
    for (auto& [handle, stream] : device->streams) stream->lock_for_fork();
  }
  for (auto& [handle, event] : events_) event->lock_for_fork();
  for (auto& event : destroyed_events_) event->lock_for_fork();
  return faults_.check(Primitive::kPrepareFork);
}

void SimDriver::unlock_after_fork(bool in_child) noexcept {
  for (auto& event : destroyed_events_) event->unlock_after_fork(in_child);
  for (auto& [handle, event] : events_) event->unlock_after_fork(in_child);
  for (auto& device : devices_) {
    for (auto& [handle, stream] : device->streams) stream->unlock_after_fork(in_child);
    device->mutex.unlock();
  }
  handles_mutex_.unlock();
}

void SimDriver::after_fork_in_parent() noexcept {
  unlock_after_fork(false);
}

void SimDriver::after_fork_in_child() noexcept {
  // No thread is started in here: the next call that looks at a stream or an event does it.
  unlock_after_fork(true);
  resume_streams_.store(true);
}

void SimDriver::resume_after_fork() noexcept {
  if (!resume_streams_.load(std::memory_order_relaxed) || !resume_streams_.exchange(false)) return;
  for (auto& device : devices_) {
    std::lock_guard lock(device->mutex);
    for (auto& [handle, stream] : device->streams) stream->resume();
  }
}

}  // namespace mybackend
