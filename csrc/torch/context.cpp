#include "torch/context.h"

#include <c10/util/Exception.h>

#include <mutex>

#include "base/thread_local.h"
#include "torch/cpu_allocator.h"
#include "torch/lender.h"

namespace mybackend::glue {
namespace {

MYBACKEND_HOT_THREAD_LOCAL c10::DeviceIndex t_device = 0;
thread_local std::unique_ptr<StreamHandle[]> t_streams;  // on the heap: see base/thread_local.h
// How many of them differ from the default stream: on most threads none.
MYBACKEND_HOT_THREAD_LOCAL int t_other_streams = 0;

std::atomic<DeviceMemory*> g_memory{nullptr};

DeviceMemory& start_memory() {
  Status error;
  if (Runtime::get().driver_name(&error) == "cuda") {
    if (Runtime::get().cuda_memory(&error) == nullptr) raise({error.code(), "driver:cuda: " + error.message()});
    start_lending_gpu();
  }
  DeviceMemory* started = error.ok() ? Runtime::get().memory(&error) : nullptr;
  if (started == nullptr) raise(error);
  if (!on_gpu()) install_cpu_allocator();
  g_memory.store(started, std::memory_order_release);
  return *started;
}

}  // namespace

void raise(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOutOfMemory: TORCH_CHECK_WITH(OutOfMemoryError, false, status.message());
    case StatusCode::kInvalidArgument: TORCH_CHECK_VALUE(false, status.message());
    case StatusCode::kNotSupported: TORCH_CHECK_NOT_IMPLEMENTED(false, status.message());
    default: TORCH_CHECK(false, "mybackend: ", status.message());
  }
}

void check(const Status& status) {
  if (!status.ok()) raise(status);
}

DeviceMemory& memory() {
  DeviceMemory* memory = g_memory.load(std::memory_order_acquire);
  if (C10_LIKELY(memory != nullptr && !Runtime::get().is_in_bad_fork())) return *memory;
  return start_memory();
}

void check_device_index(c10::DeviceIndex device) {
  const int count = Runtime::get().device_count();
  TORCH_CHECK(device >= 0 && device < count, "mybackend error: invalid device ordinal ", static_cast<int>(device), " (there ",
              count == 1 ? "is 1 device" : "are " + std::to_string(count) + " devices", ")");
}

c10::DeviceIndex current_device() noexcept {
  return t_device;
}

void set_current_device(c10::DeviceIndex device) {
  if (device != t_device) check_device_index(device);
  t_device = device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  const c10::DeviceIndex previous = t_device;
  set_current_device(device);
  return previous;
}

c10::DeviceIndex resolve_device(c10::Device device) {
  if (!device.has_index()) return t_device;
  if (device.index() != t_device) check_device_index(device.index());
  return device.index();
}

StreamHandle current_stream(c10::DeviceIndex device) noexcept {
  return t_other_streams == 0 ? kDefaultStream : t_streams[device];
}

StreamHandle exchange_stream(c10::DeviceIndex device, StreamHandle stream) noexcept {
  if (t_streams == nullptr) t_streams = std::make_unique<StreamHandle[]>(kMaxDevices);
  t_other_streams += (stream != kDefaultStream) - (t_streams[device] != kDefaultStream);
  return std::exchange(t_streams[device], stream);
}

void wait_for_current_stream(c10::DeviceIndex device) {
  if (on_gpu()) return;  // its work follows in the stream's order
  Driver& driver = memory().driver();
  if (driver.maybe_busy(device)) check(driver.stream_synchronize(device, current_stream(device)));
}

}  // namespace mybackend::glue
