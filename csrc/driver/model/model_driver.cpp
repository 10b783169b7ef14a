#include "driver/model/model_driver.h"

#include "base/units.h"

namespace mybackend {
namespace {

Status bad(const char* message) {
  return {StatusCode::kInvalidArgument, message};
}
Status out_of_memory() {
  return {StatusCode::kOutOfMemory, "the model device is full"};
}
Status unsupported(const char* what) {
  return {StatusCode::kNotSupported, std::string(what) + ": the model driver runs no work"};
}

}  // namespace

Status ModelDriver::device_info(int, DeviceInfo* out) noexcept {
  out->name = "mybackend model";
  out->total_bytes = capacity_bytes_;
  out->page_bytes = kGrain;
  out->multi_processor_count = 1;
  return {};
}

Status ModelDriver::memory_info(int, MemoryInfo* out) noexcept {
  *out = {capacity_bytes_ - used_bytes_, capacity_bytes_};
  return {};
}

Status ModelDriver::memory_allocate(int, std::size_t bytes, void** out) noexcept {
  if (bytes == 0) return bad("memory_allocate: 0 bytes");
  if (bytes > capacity_bytes_) return out_of_memory();
  const std::size_t rounded = round_up(bytes, kGrain);
  if (rounded > capacity_bytes_ - used_bytes_) return out_of_memory();
  ++counts_.malloc;
  allocations_.emplace(next_malloc_, rounded);
  used_bytes_ += rounded;
  *out = reinterpret_cast<void*>(next_malloc_);
  next_malloc_ += rounded;
  return {};
}

Status ModelDriver::memory_free(int, void* ptr) noexcept {
  auto found = allocations_.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (found == allocations_.end()) return bad("memory_free: not an allocation");
  ++counts_.free;
  used_bytes_ -= found->second;
  allocations_.erase(found);
  return {};
}

Status ModelDriver::address_reserve(int, std::size_t bytes, void** out) noexcept {
  *out = reinterpret_cast<void*>(next_reserve_);
  next_reserve_ += round_up(bytes, kGrain);
  return {};
}

Status ModelDriver::address_free(int, void*, std::size_t) noexcept {
  return {};
}

Status ModelDriver::physical_create(int, std::size_t bytes, PhysicalHandle* out) noexcept {
  if (bytes > capacity_bytes_ - used_bytes_) return out_of_memory();
  used_bytes_ += bytes;
  *out = next_physical_++;
  physicals_.emplace(*out, bytes);
  return {};
}

Status ModelDriver::physical_release(int, PhysicalHandle handle) noexcept {
  auto found = physicals_.find(handle);
  if (found == physicals_.end()) return bad("physical_release: unknown handle");
  used_bytes_ -= found->second;
  physicals_.erase(found);
  return {};
}

Status ModelDriver::memory_map(int, void*, PhysicalHandle) noexcept {
  ++counts_.map;
  return {};
}

Status ModelDriver::memory_unmap(int, void*, PhysicalHandle) noexcept {
  ++counts_.unmap;
  return {};
}

int ModelDriver::device_of(const void*) const noexcept {
  return 0;
}

Status ModelDriver::stream_create(int, int, StreamHandle*) noexcept {
  return unsupported("stream_create");
}
Status ModelDriver::stream_query(int, StreamHandle) noexcept {
  return {};
}

Status ModelDriver::stream_synchronize(int, StreamHandle stream) noexcept {
  advance(stream);
  return {};
}

Status ModelDriver::device_synchronize(int) noexcept {
  for (auto& [stream, completed] : completed_) completed = recorded_;
  return {};
}

Status ModelDriver::stream_enqueue(int, StreamHandle, const char*, std::function<void()>) noexcept {
  return unsupported("stream_enqueue");
}

Status ModelDriver::copy_async(int, StreamHandle, void*, const void*, std::size_t) noexcept {
  return unsupported("copy_async");
}

Status ModelDriver::event_create(int, EventHandle* out) noexcept {
  *out = next_event_++;
  events_.emplace(*out, Event{});
  return {};
}

void ModelDriver::event_destroy(int, EventHandle event) noexcept {
  events_.erase(event);
}

Status ModelDriver::event_record(int, EventHandle event, StreamHandle stream) noexcept {
  auto found = events_.find(event);
  if (found == events_.end()) return bad("event_record: unknown event");
  found->second = {stream, ++recorded_};
  return {};
}

Status ModelDriver::event_query(int, EventHandle event) noexcept {
  auto found = events_.find(event);
  if (found == events_.end()) return bad("event_query: unknown event");
  const Event& e = found->second;
  if (e.serial == 0 || completed_[e.stream] >= e.serial) return {};
  return {StatusCode::kNotReady, "event is not complete"};
}

Status ModelDriver::event_synchronize(int, EventHandle event) noexcept {
  auto found = events_.find(event);
  if (found == events_.end()) return bad("event_synchronize: unknown event");
  std::uint64_t& completed = completed_[found->second.stream];
  completed = std::max(completed, found->second.serial);
  return {};
}

Status ModelDriver::stream_wait_event(int, StreamHandle, EventHandle) noexcept {
  return {};
}
Status ModelDriver::event_elapsed_ns(EventHandle, EventHandle, std::int64_t*) noexcept {
  return unsupported("event_elapsed_ns");
}

}  // namespace mybackend
