// The calling thread's current device and streams, and the way from a Status to the exception
// that torch expects.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "capi/runtime.h"
#include "core/device_memory.h"

namespace mybackend::glue {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr int kMaxDevices = 64;

// Throws what a Status means: ValueError, OutOfMemoryError, NotImplementedError or RuntimeError.
void check(const Status& status);
[[noreturn]] void raise(const Status& status);

// The devices; starts them on first use, and with them what lends them its kernels (lender.h).
// Throws when they cannot start.
DeviceMemory& memory();

c10::DeviceIndex current_device() noexcept;
// Throws for an index that is not there, in CUDA's words.
void set_current_device(c10::DeviceIndex device);
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
void check_device_index(c10::DeviceIndex device);
// -1 is the current device.
c10::DeviceIndex resolve_device(c10::Device device);

// The allocator allocates on the current device: make the wanted one current for the call.
class DeviceScope {
 public:
  explicit DeviceScope(c10::Device device) : previous_(exchange_device(device.index())) {}
  ~DeviceScope() { exchange_device(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const c10::DeviceIndex previous_;
};

StreamHandle current_stream(c10::DeviceIndex device) noexcept;
StreamHandle exchange_stream(c10::DeviceIndex device, StreamHandle stream) noexcept;
inline c10::Stream to_stream(c10::DeviceIndex device, StreamHandle handle) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device), static_cast<c10::StreamId>(handle));
}
inline StreamHandle to_handle(const c10::Stream& stream) {
  return static_cast<StreamHandle>(stream.id());
}

// Waits until the earlier work of the device's current stream is done: what an operator that runs
// on the calling thread does first. On a GPU nothing does, and there is nothing to wait for.
void wait_for_current_stream(c10::DeviceIndex device);

// Waits until autograd's device threads have put down what they hold. A thread that lets go of a
// tensor with a Python object while the interpreter finalizes ends the process; a backward of
// our own, behind theirs in the queue, shows that they are done. Call it without the GIL.
void drain_autograd_threads() noexcept;

// Milliseconds between two recorded events of c10 (the void* that c10::Event holds).
double event_elapsed_ms(void* start, void* end);

}  // namespace mybackend::glue
