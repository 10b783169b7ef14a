// The contract with a device runtime. Everything that `core` knows of a device goes through
// this class; `sim` (host memory), `model` (addresses only) and `cuda` implement it.
//
// Vocabulary
//   device     0 .. device_count() - 1
//   stream     FIFO queue of work on one device; 0 is the device's default stream, it always
//              exists. Handles are never reused while the driver lives.
//   event      a marker in a stream. An event that was never recorded counts as complete.
//   physical   device memory without an address; gets one by memory_map (virtual memory)
//
// All calls are thread-safe. A failed call changes nothing. kInvalidArgument is the answer to
// every broken precondition, kOutOfMemory to missing room; anything else is kFailed with the
// call's name. No call throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/status.h"

namespace mybackend {

using StreamHandle = std::uint64_t;
using EventHandle = std::uint64_t;
using PhysicalHandle = std::uint64_t;
using CaptureMarker = std::uint64_t;

inline constexpr StreamHandle kDefaultStream = 0;

struct MemoryInfo {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

struct DeviceInfo {
  const char* name = "";
  std::size_t total_bytes = 0;
  std::size_t page_bytes = 0;     // granularity of the virtual memory calls
  int multi_processor_count = 0;  // CPU threads on `sim`
};

class Driver {
 public:
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  virtual ~Driver() = default;

  virtual const char* name() const noexcept = 0;
  virtual int device_count() const noexcept = 0;
  virtual Status device_info(int device, DeviceInfo* out) noexcept = 0;
  // Whether the host can read and write device memory: then host memory can stand in for it.
  virtual bool is_host_memory() const noexcept { return true; }

  // --- Memory -----------------------------------------------------------------------------
  virtual Status memory_info(int device, MemoryInfo* out) noexcept = 0;

  // pre: bytes > 0. post: *out is the start of at least `bytes` usable bytes, aligned to
  // 2 MiB on sim and model, 512 on others. kOutOfMemory when the device has no room.
  virtual Status memory_allocate(int device, std::size_t bytes, void** out) noexcept = 0;
  // pre: ptr came from memory_allocate on `device` and was not freed. Waits for all work on
  // the device first. post: the bytes are the device's again.
  virtual Status memory_free(int device, void* ptr) noexcept = 0;

  // --- Virtual memory -----------------------------------------------------------------------
  // kNotSupported from all of them where the device has none.
  // pre: bytes > 0, a multiple of page_bytes. post: an address range without memory.
  virtual Status address_reserve(int device, std::size_t bytes, void** out) noexcept = 0;
  // pre: a whole reserved range, nothing mapped in it.
  virtual Status address_free(int device, void* ptr, std::size_t bytes) noexcept = 0;
  // post: `bytes` (a multiple of page_bytes) of the device's memory are set aside.
  virtual Status physical_create(int device, std::size_t bytes, PhysicalHandle* out) noexcept = 0;
  // pre: not mapped. post: the bytes are the device's again.
  virtual Status physical_release(int device, PhysicalHandle handle) noexcept = 0;
  // pre: [ptr, ptr + size of handle) lies in one reserved range, unmapped. post: usable.
  virtual Status memory_map(int device, void* ptr, PhysicalHandle handle) noexcept = 0;
  // pre: exactly a range that memory_map made. Does not wait for the device.
  virtual Status memory_unmap(int device, void* ptr, PhysicalHandle handle) noexcept = 0;

  // The device that owns the byte at ptr, or -1 when it is not device memory of this driver.
  virtual int device_of(const void* ptr) const noexcept = 0;

  // --- Streams ------------------------------------------------------------------------------
  // priority: lower is more urgent, as in CUDA; clamped to what the device has.
  virtual Status stream_create(int device, int priority, StreamHandle* out) noexcept = 0;
  // ok: idle. kNotReady: work is queued. kFailed: a task of this stream failed (the message is
  // the task's); the error is then cleared.
  virtual Status stream_query(int device, StreamHandle stream) noexcept = 0;
  virtual Status stream_synchronize(int device, StreamHandle stream) noexcept = 0;
  virtual Status device_synchronize(int device) noexcept = 0;
  // False only when no stream of the device has work queued. Cheap: asked before each operator.
  virtual bool maybe_busy(int device) const noexcept = 0;
  // Runs `task` after all earlier work of the stream. What it throws is kept as the stream's
  // error. `name` must outlive the call only.
  virtual Status stream_enqueue(int device, StreamHandle stream, const char* name, std::function<void()> task) noexcept = 0;
  // Copies between any two of: device memory, host memory. Queued on the stream; the caller
  // keeps both alive until it has run.
  virtual Status copy_async(int device, StreamHandle stream, void* dst, const void* src, std::size_t bytes) noexcept = 0;

  // --- Host memory --------------------------------------------------------------------------
  // Locks host memory for all devices, so that copy_async from and to it leaves the calling thread
  // free. pre: whole pages, not registered. kNotSupported where device memory is the host's.
  virtual Status host_register(void*, std::size_t) noexcept { return {StatusCode::kNotSupported, "host_register"}; }
  // pre: exactly a range that host_register took; no copy of it is queued.
  virtual Status host_unregister(void*) noexcept { return {StatusCode::kNotSupported, "host_unregister"}; }

  // --- Events -------------------------------------------------------------------------------
  virtual Status event_create(int device, EventHandle* out) noexcept = 0;
  virtual void event_destroy(int device, EventHandle event) noexcept = 0;
  virtual Status event_record(int device, EventHandle event, StreamHandle stream) noexcept = 0;
  virtual Status event_query(int device, EventHandle event) noexcept = 0;
  virtual Status event_synchronize(int device, EventHandle event) noexcept = 0;
  // Later work of `stream` starts only when the event, as last recorded now, is complete.
  virtual Status stream_wait_event(int device, StreamHandle stream, EventHandle event) noexcept = 0;
  // pre: both were recorded and are complete.
  virtual Status event_elapsed_ns(EventHandle start, EventHandle end, std::int64_t* out) noexcept = 0;

  // --- Stream captures ------------------------------------------------------------------------
  // For streams whose work is being captured into a graph. kNotSupported where there are no graphs,
  // kNotReady for a stream that is not being captured.
  //
  // Puts a marker behind what `stream` has captured so far, before what it captures next.
  virtual Status capture_mark(int, StreamHandle, CaptureMarker*) noexcept { return {StatusCode::kNotSupported, "capture_mark"}; }
  // post: (*out)[i] tells whether markers[i], of the same capture, comes before whatever `stream`
  // captures next, on every replay.
  virtual Status capture_passed(int, StreamHandle, const std::vector<CaptureMarker>&, std::vector<bool>*) noexcept {
    return {StatusCode::kNotSupported, "capture_passed"};
  }

  // --- Process ------------------------------------------------------------------------------
  // Called around fork(): locks are held over it, and one of the after_* calls follows on each
  // side whatever this returns. The child goes on with the queues as they were. kNotSupported
  // when a child cannot use the device.
  virtual Status prepare_fork() noexcept = 0;
  virtual void after_fork_in_parent() noexcept = 0;
  virtual void after_fork_in_child() noexcept = 0;
};

}  // namespace mybackend
