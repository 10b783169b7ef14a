// The backend that lends its kernels: the CPU where the device's bytes are host memory, CUDA where
// they are a GPU's (driver:cuda). Fixed when the devices start.
//
// On a GPU the allocator under torch.cuda is ours (mybackend.cuda.install), so what a kernel
// allocates can be adopted as it is; and the kernels follow the current CUDA device and stream,
// which a LendingScope sets to the device's own.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>

#include <atomic>
#include <functional>

#include "torch/context.h"
#include "torch/cpu_allocator.h"

namespace mybackend::glue {

inline std::atomic<bool> g_on_gpu{false};

// Whether the device's memory is a GPU's. False before the devices have started.
inline bool on_gpu() noexcept {
  return C10_UNLIKELY(g_on_gpu.load(std::memory_order_relaxed));
}

inline c10::DispatchKey lender_key() noexcept {
  return on_gpu() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
}
inline c10::DispatchKeySet lender_keys() noexcept {
  constexpr c10::DispatchKeySet cpu(c10::DispatchKey::CPU), cuda(c10::DispatchKey::CUDA);
  return on_gpu() ? cuda : cpu;
}
inline c10::Device lender_device(c10::DeviceIndex device) noexcept {
  return on_gpu() ? c10::Device(c10::DeviceType::CUDA, device) : c10::Device(c10::DeviceType::CPU);
}
// What the lender's own allocations come from.
c10::Allocator* lender_allocator() noexcept;

// Whether the device's allocator gave the bytes, so that they can be adopted; they then have the
// deleter of device memory.
bool take_over(c10::DataPtr& bytes) noexcept;

// Prepares torch.cuda for lending and returns its allocator, which must be ours. Throws when it
// cannot be. Called under no lock.
using PrepareGpu = std::function<c10::Allocator*()>;
void set_prepare_gpu(PrepareGpu prepare);
// For the start of the devices: from here on the GPU lends.
void start_lending_gpu();

// While it lives, the lender's kernels draw their memory from `device` and, on a GPU, run there on
// the device's current stream.
class LendingScope {
 public:
  explicit LendingScope(c10::DeviceIndex device) : borrow_(on_gpu() ? -1 : device) {
    if (on_gpu()) enter_gpu(device);
  }
  ~LendingScope() {
    if (C10_UNLIKELY(device_ >= 0)) leave_gpu();
  }
  LendingScope(const LendingScope&) = delete;
  LendingScope& operator=(const LendingScope&) = delete;

 private:
  void enter_gpu(c10::DeviceIndex device);
  void leave_gpu() noexcept;

  BorrowScope borrow_;
  c10::DeviceIndex device_ = -1;  // entered, on a GPU
  c10::DeviceIndex previous_device_ = -1;
  c10::StreamId previous_stream_ = 0;
};

// On a GPU: torch.cuda's current stream of the device.
StreamHandle lender_stream(c10::DeviceIndex device);

// Copies between bytes of the device: at once in host memory, on the current stream on a GPU.
void copy_device_bytes(c10::DeviceIndex device, void* to, const void* from, std::size_t bytes);

// NotImplementedError that names `what`, where the device's memory is not the host's.
void require_host_memory(const char* what);

}  // namespace mybackend::glue
