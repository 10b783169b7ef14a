// What the files of CudaDriver share: a device's state, the scope in which its context is current,
// and calls of the driver library that return their failure.
#pragma once

#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver/cuda/cuda_driver.h"

namespace mybackend {

using cuda::Api;
using cuda::Result;

struct CudaDriver::Device {
  cuda::DeviceOrdinal ordinal = 0;
  std::string name;
  std::size_t total_bytes = 0;
  std::size_t page_bytes = 0;  // 0: no virtual memory
  int multi_processor_count = 0;
  std::vector<int> accessors;  // other devices that may use what is mapped here; under ranges_mutex_
  bool rdma = false;
  bool exports = false;
  std::once_flag retained;
  cuda::ContextPtr context = nullptr;
  Result context_result = cuda::kSuccess;

  cuda::AllocationProperties properties() const {
    cuda::AllocationProperties p;
    p.location.id = ordinal;
    p.flags.gpu_direct_rdma_capable = rdma;
    if (exports) p.requested_handle_types = cuda::kPosixFileDescriptor;
    return p;
  }
};

// What tasks threw, by stream. Shared with the tasks: they may run when the driver object is gone.
struct CudaDriver::TaskErrors {
  std::mutex mutex;
  std::unordered_map<StreamHandle, std::string> messages;
};

inline std::string hex(std::uintptr_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%zx", static_cast<std::size_t>(value));
  return text;
}
inline std::string hex(const void* value) {
  return hex(reinterpret_cast<std::uintptr_t>(value));
}
inline cuda::StreamPtr stream_ptr(StreamHandle stream) {
  return reinterpret_cast<cuda::StreamPtr>(static_cast<std::uintptr_t>(stream));
}
inline cuda::EventPtr event_ptr(EventHandle event) {
  return reinterpret_cast<cuda::EventPtr>(static_cast<std::uintptr_t>(event));
}

// Relaxed capture mode while it lives.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Api& api) : api_(api) { (void)api_.thread_exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { (void)api_.thread_exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Api& api_;
  int mode_ = cuda::kCaptureRelaxed;
};

// The device's context is current while it lives.
class CudaDriver::OnDevice {
 public:
  OnDevice(CudaDriver& driver, int device) : driver_(driver), device_(device) {
    Device& d = *driver.devices_[static_cast<std::size_t>(device)];
    std::call_once(d.retained, [&] { d.context_result = driver.api_.primary_context_retain(&d.context, d.ordinal); });
    member_ = "primary_context_retain";
    result_ = d.context_result;
    if (result_ != cuda::kSuccess) return;
    cuda::ContextPtr current = nullptr;
    member_ = "context_get_current";
    result_ = driver.api_.context_get_current(&current);
    if (result_ != cuda::kSuccess || current == d.context) return;
    member_ = "context_push_current";
    result_ = driver.api_.context_push_current(d.context);
    pushed_ = result_ == cuda::kSuccess;
  }
  ~OnDevice() {
    cuda::ContextPtr popped = nullptr;
    if (pushed_) (void)driver_.api_.context_pop_current(&popped);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  bool ok() const { return result_ == cuda::kSuccess; }
  Status status() const { return driver_.failure(member_, "", device_, result_); }

 private:
  CudaDriver& driver_;
  const int device_;
  const char* member_ = "";
  Result result_ = cuda::kSuccess;
  bool pushed_ = false;
};

// Makes `device` current or returns; then calls `member` and returns its failure.
#define MYBACKEND_ON_DEVICE(device)                                      \
  if (Status status = check_device(device); !status.ok()) return status; \
  OnDevice on_device(*this, device);                                     \
  if (!on_device.ok()) return on_device.status()
#define MYBACKEND_CALL(member, text, ...) \
  if (Result result = api_.member(__VA_ARGS__); result != cuda::kSuccess) return failure(#member, text, device, result)

}  // namespace mybackend
