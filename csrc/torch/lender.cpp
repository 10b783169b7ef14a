#include "torch/lender.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <mutex>

#include "torch/device_allocator.h"

namespace mybackend::glue {
namespace {

PrepareGpu& prepare_gpu() {
  static auto* prepare = new PrepareGpu;
  return *prepare;
}

c10::Allocator* g_gpu_allocator = nullptr;
c10::DeleterFnPtr g_gpu_deleter = nullptr;
const c10::impl::DeviceGuardImplInterface* g_gpu = nullptr;

}  // namespace

void set_prepare_gpu(PrepareGpu prepare) {
  prepare_gpu() = std::move(prepare);
}

void start_lending_gpu() {
  TORCH_CHECK_NOT_IMPLEMENTED(prepare_gpu() != nullptr, "driver:cuda: mybackend's Python package is not loaded");
  c10::Allocator* const allocator = prepare_gpu()();  // under no lock: it waits for Python's
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  g_gpu_allocator = allocator;
  g_gpu_deleter = g_gpu_allocator->raw_deleter();
  g_gpu = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  g_on_gpu.store(true);
}

c10::Allocator* lender_allocator() noexcept {
  return on_gpu() ? g_gpu_allocator : c10::GetAllocator(c10::DeviceType::CPU);
}

bool take_over(c10::DataPtr& bytes) noexcept {
  if (C10_LIKELY(bytes.get_deleter() == &delete_device_bytes)) return true;
  // Both deleters take the address and give it back to the same allocator.
  return on_gpu() && bytes.get_deleter() == g_gpu_deleter && bytes.compare_exchange_deleter(g_gpu_deleter, &delete_device_bytes);
}

void LendingScope::enter_gpu(c10::DeviceIndex device) {
  const c10::Device gpu(c10::DeviceType::CUDA, device);
  previous_device_ = g_gpu->exchangeDevice(gpu).index();
  // Streams of ours are the driver's; torch.cuda names such a stream by its address, too.
  const auto stream = static_cast<c10::StreamId>(current_stream(device));
  try {
    previous_stream_ = g_gpu->exchangeStream(c10::Stream(c10::Stream::UNSAFE, gpu, stream)).id();
  } catch (...) {
    g_gpu->uncheckedSetDevice(c10::Device(c10::DeviceType::CUDA, previous_device_));
    throw;
  }
  device_ = device;
}

void LendingScope::leave_gpu() noexcept {
  g_gpu->exchangeStream(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device_), previous_stream_));
  g_gpu->uncheckedSetDevice(c10::Device(c10::DeviceType::CUDA, previous_device_));
}

StreamHandle lender_stream(c10::DeviceIndex device) {
  const c10::Stream stream = g_gpu->getStream(c10::Device(c10::DeviceType::CUDA, device));
  return static_cast<StreamHandle>(reinterpret_cast<std::uintptr_t>(g_gpu->getStreamNativeHandle(stream)));
}

void copy_device_bytes(c10::DeviceIndex device, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (on_gpu())
    check(memory().driver().copy_async(device, current_stream(device), to, from, bytes));
  else
    std::memcpy(to, from, bytes);
}

void require_host_memory(const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(memory().driver().is_host_memory(), what,
                              " needs host memory; the memory of driver:", memory().driver().name(), " is a GPU's");
}

}  // namespace mybackend::glue
