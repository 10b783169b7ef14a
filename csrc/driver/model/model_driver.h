// A device without memory: ever-increasing addresses, a capacity, and streams whose work
// completes only when told. Deterministic, so that decisions of an allocator can be replayed
// and compared. Everything about asynchronous work beyond events is kNotSupported.
//
// Not thread-safe by itself: a replay is one thread.
#pragma once

#include <map>
#include <unordered_map>

#include "driver/driver.h"

namespace mybackend {

struct ModelCounts {
  std::uint64_t malloc = 0, free = 0, map = 0, unmap = 0;
};

class ModelDriver final : public Driver {
 public:
  explicit ModelDriver(std::size_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  const char* name() const noexcept override { return "model"; }
  int device_count() const noexcept override { return 1; }
  Status device_info(int device, DeviceInfo* out) noexcept override;
  Status memory_info(int device, MemoryInfo* out) noexcept override;
  Status memory_allocate(int device, std::size_t bytes, void** out) noexcept override;
  Status memory_free(int device, void* ptr) noexcept override;
  Status address_reserve(int device, std::size_t bytes, void** out) noexcept override;
  Status address_free(int device, void* ptr, std::size_t bytes) noexcept override;
  Status physical_create(int device, std::size_t bytes, PhysicalHandle* out) noexcept override;
  Status physical_release(int device, PhysicalHandle handle) noexcept override;
  Status memory_map(int device, void* ptr, PhysicalHandle handle) noexcept override;
  Status memory_unmap(int device, void* ptr, PhysicalHandle handle) noexcept override;
  int device_of(const void* ptr) const noexcept override;

  Status stream_create(int device, int priority, StreamHandle* out) noexcept override;
  Status stream_query(int device, StreamHandle stream) noexcept override;
  Status stream_synchronize(int device, StreamHandle stream) noexcept override;
  Status device_synchronize(int device) noexcept override;
  bool maybe_busy(int) const noexcept override { return true; }
  Status stream_enqueue(int, StreamHandle, const char*, std::function<void()>) noexcept override;
  Status copy_async(int, StreamHandle, void*, const void*, std::size_t) noexcept override;
  Status event_create(int device, EventHandle* out) noexcept override;
  void event_destroy(int device, EventHandle event) noexcept override;
  Status event_record(int device, EventHandle event, StreamHandle stream) noexcept override;
  Status event_query(int device, EventHandle event) noexcept override;
  Status event_synchronize(int device, EventHandle event) noexcept override;
  Status stream_wait_event(int, StreamHandle, EventHandle) noexcept override;
  Status event_elapsed_ns(EventHandle, EventHandle, std::int64_t*) noexcept override;
  Status prepare_fork() noexcept override { return {}; }
  void after_fork_in_parent() noexcept override {}
  void after_fork_in_child() noexcept override {}

  // The stream catches up: events recorded on it so far are complete.
  void advance(StreamHandle stream) { completed_[stream] = recorded_; }
  ModelCounts counts() const noexcept { return counts_; }

 private:
  static constexpr std::size_t kGrain = std::size_t{2} << 20;
  static constexpr std::uintptr_t kMallocBase = 0x700000000000;
  static constexpr std::uintptr_t kReserveBase = 0x600000000000;

  std::size_t capacity_bytes_;
  std::size_t used_bytes_ = 0;
  std::uintptr_t next_malloc_ = kMallocBase;
  std::uintptr_t next_reserve_ = kReserveBase;
  std::unordered_map<std::uintptr_t, std::size_t> allocations_;
  std::unordered_map<PhysicalHandle, std::size_t> physicals_;
  PhysicalHandle next_physical_ = 1;
  struct Event {
    StreamHandle stream = 0;
    std::uint64_t serial = 0;  // 0: never recorded
  };
  std::unordered_map<EventHandle, Event> events_;
  EventHandle next_event_ = 1;
  std::uint64_t recorded_ = 0;  // serial of the last recording
  std::unordered_map<StreamHandle, std::uint64_t> completed_;
  ModelCounts counts_;
};

}  // namespace mybackend
