// A device made of host memory: real bytes, real asynchronous streams, a capacity, scripted
// faults. It is what `mybackend` tensors live on when there is no GPU.
//
//   range      each device owns one reserved address range, so that "is this pointer device
//              memory?" is a comparison; segments are carved from it, first fit
//   page       2 MiB, so that the system can back a segment with huge pages
//
// `mutex` of a Device guards its ranges and its capacity; a stream has a mutex of its own.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/units.h"
#include "driver/driver.h"
#include "driver/fault_script.h"
#include "driver/sim/sim_stream.h"

namespace mybackend {

struct SimOptions {
  int device_count = 1;
  std::size_t capacity_bytes = 0;  // per device; 0: 80 % of the machine's memory
  ClockFn clock = &steady_now_ns;
};

class SimDriver final : public Driver {
 public:
  static constexpr std::size_t kPageBytes = 2 * kMiB;

  // Fails with kOutOfMemory when the system refuses even a range of the capacity's size.
  static Status create(const SimOptions& options, std::unique_ptr<SimDriver>* out);
  ~SimDriver() override;

  const char* name() const noexcept override { return "sim"; }
  int device_count() const noexcept override { return static_cast<int>(devices_.size()); }
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
  bool maybe_busy(int device) const noexcept override;
  Status stream_enqueue(int device, StreamHandle stream, const char* name, std::function<void()> task) noexcept override;
  Status copy_async(int device, StreamHandle stream, void* dst, const void* src, std::size_t bytes) noexcept override;

  Status event_create(int device, EventHandle* out) noexcept override;
  void event_destroy(int device, EventHandle event) noexcept override;
  Status event_record(int device, EventHandle event, StreamHandle stream) noexcept override;
  Status event_query(int device, EventHandle event) noexcept override;
  Status event_synchronize(int device, EventHandle event) noexcept override;
  Status stream_wait_event(int device, StreamHandle stream, EventHandle event) noexcept override;
  Status event_elapsed_ns(EventHandle start, EventHandle end, std::int64_t* out) noexcept override;

  Status prepare_fork() noexcept override;
  void after_fork_in_parent() noexcept override;
  void after_fork_in_child() noexcept override;

  FaultScript& faults() noexcept { return faults_; }

 private:
  struct Device;
  explicit SimDriver(const SimOptions& options);
  Status check_device(int device) const;
  Status find_stream(int device, StreamHandle stream, SimStream** out) noexcept;
  Status find_event(EventHandle event, std::shared_ptr<SimEvent>* out) noexcept;
  void unlock_after_fork(bool in_child) noexcept;
  void resume_after_fork() noexcept;

  SimOptions options_;
  FaultScript faults_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::atomic<bool> resume_streams_{false};  // a fork left work in queues without workers
  std::mutex handles_mutex_;                 // guards the four below
  StreamHandle next_stream_ = 1;
  EventHandle next_event_ = 1;
  std::unordered_map<EventHandle, std::shared_ptr<SimEvent>> events_;
  std::vector<std::shared_ptr<SimEvent>> destroyed_events_;  // with a recording still queued
};

}  // namespace mybackend
