// GPUs through their driver library (cuda_api.h). Stream and event handles are the driver's own
// pointers, so that streams of `torch.cuda` can be named; 0 is the default stream.
//
//   context   each device's primary context, which the CUDA runtime uses too. It is retained at
//             the device's first call that needs one, and made current around each call
//   ranges    what the driver gave us, by address: the answer to "whose byte is this?", and what
//             tells a double free from a free
//   captures  memory calls are made in relaxed capture mode: a stream capture of the same thread
//             does not forbid them
//
// Not possible here, and answered so: a fork (the driver's state does not survive it).
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "driver/cuda/cuda_api.h"
#include "driver/driver.h"

namespace mybackend {

class CudaDriver final : public Driver {
 public:
  // kNotSupported with what was looked for when there is no driver or no device.
  static Status create(cuda::Vendor vendor, std::unique_ptr<CudaDriver>* out);
  ~CudaDriver() override;

  const char* name() const noexcept override { return api_.vendor == cuda::Vendor::kHip ? "hip" : "cuda"; }
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
  bool is_host_memory() const noexcept override { return false; }
  bool maybe_busy(int) const noexcept override { return true; }
  Status stream_enqueue(int device, StreamHandle stream, const char* name, std::function<void()> task) noexcept override;
  Status copy_async(int device, StreamHandle stream, void* dst, const void* src, std::size_t bytes) noexcept override;

  Status host_register(void* ptr, std::size_t bytes) noexcept override;
  Status host_unregister(void* ptr) noexcept override;

  Status event_create(int device, EventHandle* out) noexcept override;
  void event_destroy(int device, EventHandle event) noexcept override;
  Status event_record(int device, EventHandle event, StreamHandle stream) noexcept override;
  Status event_query(int device, EventHandle event) noexcept override;
  Status event_synchronize(int device, EventHandle event) noexcept override;
  Status stream_wait_event(int device, StreamHandle stream, EventHandle event) noexcept override;
  Status event_elapsed_ns(EventHandle start, EventHandle end, std::int64_t* out) noexcept override;

  Status capture_mark(int device, StreamHandle stream, CaptureMarker* out) noexcept override;
  Status capture_passed(int device, StreamHandle stream, const std::vector<CaptureMarker>& markers,
                        std::vector<bool>* out) noexcept override;

  Status prepare_fork() noexcept override;
  void after_fork_in_parent() noexcept override;
  void after_fork_in_child() noexcept override;

  // --- Mapped memory of several processes and devices ---
  // One page of mapped memory, for another process: a file descriptor, and a number that no other
  // page of this process has or had.
  struct SharedPage {
    std::uint64_t serial = 0;
    int fd = -1;
  };
  // The pages of [ptr, ptr + bytes), in order; exactly whole mappings of one size, which is
  // *page_bytes. The descriptors are the driver's and live as long as the pages.
  Status export_mapped(int device, const void* ptr, std::size_t bytes, std::vector<SharedPage>* out, std::size_t* page_bytes) noexcept;
  // Maps pages that another process exported, one after the other; the descriptors stay the caller's.
  Status import_mapped(int device, const std::vector<int>& fds, std::size_t page_bytes, void** out) noexcept;
  // pre: import_mapped gave it.
  Status unmap_imported(int device, void* ptr) noexcept;
  // Lets `accessor` read and write what is and will be mapped on `owner`.
  Status allow_access(int owner, int accessor) noexcept;

  const cuda::Api& api() const noexcept { return api_; }

 private:
  struct Device;
  class OnDevice;
  enum class RangeKind : unsigned char { kAllocated, kReserved };
  struct Range {
    std::size_t bytes;
    int device;
    RangeKind kind;
  };
  struct Physical {
    std::size_t bytes;
    int device;
    std::uintptr_t mapped_at;  // 0: not mapped
    bool is_stale = false;     // a failed memory_map could not take its mapping back
    SharedPage shared = {};    // once it was exported
  };
  struct TaskErrors;

  explicit CudaDriver(cuda::Api api);
  Status start();
  Status check_device(int device) const;
  // "cuMemAlloc_v2(bytes=512) on device 0: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
  Status failure(const char* member, const std::string& arguments, int device, cuda::Result result) const;
  Status set_access(int device, std::uintptr_t address, std::size_t bytes, int accessor);
  Status unmap_stale(PhysicalHandle handle, int device);
  Status take_task_error(StreamHandle stream);

  cuda::Api api_;
  std::vector<std::unique_ptr<Device>> devices_;
  mutable std::shared_mutex ranges_mutex_;
  std::map<std::uintptr_t, Range> ranges_;
  std::unordered_map<PhysicalHandle, Physical> physical_;
  std::size_t stale_count_ = 0;  // of them
  mutable std::mutex events_mutex_;
  std::unordered_map<EventHandle, int> events_;  // to their device
  std::shared_ptr<TaskErrors> task_errors_;
};

}  // namespace mybackend
