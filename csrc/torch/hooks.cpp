// The hooks interface: how ATen asks about the device as a whole.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "torch/context.h"
#include "torch/generator.h"
#include "torch/host_allocator.h"
#include "torch/storage_ops.h"

namespace mybackend::glue {
namespace {

struct MyBackendHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return Runtime::get().device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return Runtime::get().memory_if_started() != nullptr; }
  void init() const override { memory(); }

  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(Runtime::get().device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchange_device(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }

  at::Device getDeviceFromPtr(void* data) const override {
    const int device = memory().driver().device_of(data);
    TORCH_CHECK(device >= 0, "The pointer ", data, " is not memory of a mybackend device");
    return at::Device(kDeviceType, static_cast<c10::DeviceIndex>(device));
  }

  bool isPinnedPtr(const void* ptr) const override { return is_pinned_pointer(ptr); }
  at::Allocator* getPinnedMemoryAllocator() const override { return host_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    resize_storage_bytes(storage.unsafeGetStorageImpl(), nbytes);
  }
};

const bool g_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new MyBackendHooks);
  return true;
}();

}  // namespace
}  // namespace mybackend::glue
