// The device guard: how c10 asks for devices, streams and events.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "torch/context.h"
#include "torch/device_allocator.h"

namespace mybackend::glue {
namespace {

// What c10 holds as void*: the event and the device it lives on.
struct GuardEvent {
  EventHandle handle;
  c10::DeviceIndex device;
};

struct MyBackendGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kDeviceType, exchange_device(resolve_device(device)));
  }
  c10::Device getDevice() const override { return c10::Device(kDeviceType, current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(resolve_device(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() >= 0 && device.index() < Runtime::get().device_count()) set_current_device(device.index());
  }

  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex index = resolve_device(device);
    return to_stream(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return to_stream(resolve_device(device), kDefaultStream); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    const c10::DeviceIndex index = resolve_device(device);
    StreamHandle handle = 0;
    check(memory().driver().stream_create(index, priority, &handle));
    return to_stream(index, handle);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return to_stream(stream.device_index(), exchange_stream(stream.device_index(), to_handle(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(to_handle(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Status status = memory().driver().stream_query(stream.device_index(), to_handle(stream));
    if (status.code() == StatusCode::kNotReady) return false;
    check(status);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check(memory().driver().stream_synchronize(stream.device_index(), to_handle(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check_device_index(device);
    check(memory().driver().device_synchronize(device));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto* e = static_cast<GuardEvent*>(*event);
    if (e == nullptr) {
      auto made = std::make_unique<GuardEvent>(GuardEvent{0, stream.device_index()});
      check(memory().driver().event_create(stream.device_index(), &made->handle));
      *event = e = made.release();
    }
    TORCH_CHECK(e->device == stream.device_index(), "Event device index ", static_cast<int>(e->device),
                " does not match recording stream's device index ", static_cast<int>(stream.device_index()), ".");
    check(memory().driver().event_record(e->device, e->handle, to_handle(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    check(memory().driver().stream_wait_event(stream.device_index(), to_handle(stream), static_cast<GuardEvent*>(event)->handle));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    auto* e = static_cast<GuardEvent*>(event);
    const Status status = memory().driver().event_query(e->device, e->handle);
    if (status.code() == StatusCode::kNotReady) return false;
    check(status);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto* e = static_cast<GuardEvent*>(event);
    check(memory().driver().event_synchronize(e->device, e->handle));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr) return;
    auto* e = static_cast<GuardEvent*>(event);
    if (DeviceMemory* memory = Runtime::get().memory_if_started()) memory->driver().event_destroy(e->device, e->handle);
    delete e;
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    std::int64_t ns = 0;
    const Status status =
        memory().driver().event_elapsed_ns(static_cast<GuardEvent*>(start)->handle, static_cast<GuardEvent*>(end)->handle, &ns);
    TORCH_CHECK(status.code() != StatusCode::kNotReady, "Both events must be completed before calculating elapsed time.");
    check(status);
    return static_cast<double>(ns) / 1e6;
  }

  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    device_allocator()->recordStream(ptr, stream);
  }

  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(Runtime::get().device_count()); }

  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }  // what the CPU's kernels take: all dtypes
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, MyBackendGuard)

}  // namespace

double event_elapsed_ms(void* start, void* end) {
  return MyBackendGuard().elapsedTime(start, end, 0);
}

}  // namespace mybackend::glue
