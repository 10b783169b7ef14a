// A driver whose memory is mappings: unnamed files in a folder, or anonymous shared memory. Streams
// and events are those of the device that the tensors belong to. It lets the caching allocator pool
// mapped memory as it pools a device's.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/mapped_region.h"
#include "driver/driver.h"

namespace mybackend {

class MmapDriver final : public Driver {
 public:
  // An empty folder: anonymous shared memory. `base` outlives the object.
  MmapDriver(Driver* base, std::string folder) : base_(base), folder_(std::move(folder)) {}

  const std::string& folder() const noexcept { return folder_; }

  const char* name() const noexcept override { return "mmap"; }
  int device_count() const noexcept override { return base_->device_count(); }
  Status device_info(int device, DeviceInfo* out) noexcept override;
  // Of the folder's file system; of the device for anonymous memory.
  Status memory_info(int device, MemoryInfo* out) noexcept override;
  Status memory_allocate(int device, std::size_t bytes, void** out) noexcept override;
  Status memory_free(int device, void* ptr) noexcept override;

  // A mapping is one piece: expandable segments are not for it.
  Status address_reserve(int, std::size_t, void**) noexcept override { return no_virtual_memory(); }
  Status address_free(int, void*, std::size_t) noexcept override { return no_virtual_memory(); }
  Status physical_create(int, std::size_t, PhysicalHandle*) noexcept override { return no_virtual_memory(); }
  Status physical_release(int, PhysicalHandle) noexcept override { return no_virtual_memory(); }
  Status memory_map(int, void*, PhysicalHandle) noexcept override { return no_virtual_memory(); }
  Status memory_unmap(int, void*, PhysicalHandle) noexcept override { return no_virtual_memory(); }
  int device_of(const void*) const noexcept override { return -1; }

  Status stream_create(int d, int priority, StreamHandle* out) noexcept override { return base_->stream_create(d, priority, out); }
  Status stream_query(int d, StreamHandle s) noexcept override { return base_->stream_query(d, s); }
  Status stream_synchronize(int d, StreamHandle s) noexcept override { return base_->stream_synchronize(d, s); }
  Status device_synchronize(int d) noexcept override { return base_->device_synchronize(d); }
  bool maybe_busy(int d) const noexcept override { return base_->maybe_busy(d); }
  Status stream_enqueue(int d, StreamHandle s, const char* name, std::function<void()> task) noexcept override {
    return base_->stream_enqueue(d, s, name, std::move(task));
  }
  Status copy_async(int d, StreamHandle s, void* dst, const void* src, std::size_t bytes) noexcept override {
    return base_->copy_async(d, s, dst, src, bytes);
  }
  Status event_create(int d, EventHandle* out) noexcept override { return base_->event_create(d, out); }
  void event_destroy(int d, EventHandle e) noexcept override { base_->event_destroy(d, e); }
  Status event_record(int d, EventHandle e, StreamHandle s) noexcept override { return base_->event_record(d, e, s); }
  Status event_query(int d, EventHandle e) noexcept override { return base_->event_query(d, e); }
  Status event_synchronize(int d, EventHandle e) noexcept override { return base_->event_synchronize(d, e); }
  Status stream_wait_event(int d, StreamHandle s, EventHandle e) noexcept override { return base_->stream_wait_event(d, s, e); }
  Status event_elapsed_ns(EventHandle start, EventHandle end, std::int64_t* out) noexcept override {
    return base_->event_elapsed_ns(start, end, out);
  }

  // The base is asked by whoever owns it; only this object's own lock is held over a fork.
  Status prepare_fork() noexcept override {
    mutex_.lock();
    return {};
  }
  void after_fork_in_parent() noexcept override { mutex_.unlock(); }
  void after_fork_in_child() noexcept override { mutex_.unlock(); }

 private:
  static Status no_virtual_memory() { return {StatusCode::kNotSupported, "mapped memory has no expandable segments"}; }

  Driver* const base_;
  const std::string folder_;
  std::mutex mutex_;
  std::map<void*, std::unique_ptr<MappedRegion>> regions_;
};

}  // namespace mybackend
