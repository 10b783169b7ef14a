#include "torch/device_allocator.h"

#include <c10/core/Allocator.h>

#include "torch/context.h"
#include "torch/lender.h"
#include "torch/plan.h"

namespace mybackend::glue {
namespace {

namespace cda = c10::CachingDeviceAllocator;

void report_to_profiler(void* ptr, std::int64_t change_bytes, c10::DeviceIndex device) {
  if (C10_LIKELY(!c10::memoryProfilingEnabled())) return;
  const caching::DeviceStats stats = memory().stats(device);
  c10::reportMemoryUsageToProfiler(ptr, change_bytes, static_cast<std::size_t>(memory().tracker(device).stats().current_bytes),
                                   static_cast<std::size_t>(stats.reserved_bytes[caching::kAll].current), c10::Device(kDeviceType, device));
}

class MyBackendAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::DeviceIndex device = current_device();
    return allocate_device_bytes(device, nbytes, c10::Device(kDeviceType, device));
  }

  c10::DeleterFnPtr raw_deleter() const override { return &delete_device_bytes; }

  void copy_data(void* dst, const void* src, std::size_t nbytes) const override { copy_device_bytes(current_device(), dst, src, nbytes); }

  bool initialized() override { return Runtime::get().memory_if_started() != nullptr; }

  void emptyCache(c10::MempoolId_t pool) override {
    if (!initialized()) return;
    for (int device = 0; device < memory().device_count(); ++device) {
      memory().for_each_caching(device, [&](auto& c) { c.empty_cache({pool.first, pool.second}); });
    }
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    // A foreign deleter means that the bytes are somebody else's: nothing to defer.
    if (ptr.get() == nullptr || ptr.get_deleter() != &delete_device_bytes) return;
    memory().record_stream(ptr.get_context(), to_handle(stream));
  }

  cda::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_device_index(device);
    cda::DeviceStats to;
    caching::copy_stats(memory().stats(device), &to);
    return to;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    check_device_index(device);
    memory().for_each_caching(device, [](auto& c) { c.reset_accumulated_stats(); });
    memory().tracker(device).reset_totals();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    check_device_index(device);
    memory().for_each_caching(device, [](auto& c) { c.reset_peak_stats(); });
    memory().tracker(device).reset_peak();
  }

  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    check_device_index(device);
    MemoryInfo info;
    check(memory().driver().memory_info(device, &info));
    return {info.free_bytes, info.total_bytes};
  }
};

MyBackendAllocator& instance() {
  static auto* allocator = new MyBackendAllocator;  // tensors may outlive static destructors
  return *allocator;
}

}  // namespace

c10::DeviceAllocator* device_allocator() noexcept {
  return &instance();
}

c10::DataPtr allocate_device_bytes(c10::DeviceIndex device, std::size_t nbytes, c10::Device labelled) {
  if (nbytes == 0) return {nullptr, nullptr, &delete_device_bytes, labelled};
  if (C10_UNLIKELY(plans_in_use())) {
    if (void* place = plan_allocate(device, nbytes, current_stream(device))) return {place, place, &delete_device_bytes, labelled};
  }
  AllocationFailure failure;
  void* ptr = memory().allocate(device, nbytes, current_stream(device), &failure);
  if (C10_UNLIKELY(ptr == nullptr)) {
    if (c10::memoryProfilingEnabled()) {
      c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(nbytes), 0, 0, c10::Device(kDeviceType, device));
    }
    raise({failure.code, std::move(failure.message)});
  }
  if (C10_UNLIKELY(plans_in_use())) plan_on_allocate(device, ptr, nbytes);
  report_to_profiler(ptr, static_cast<std::int64_t>(nbytes), device);
  return {ptr, ptr, &delete_device_bytes, labelled};
}

void delete_device_bytes(void* ptr) noexcept {
  if (ptr == nullptr) return;
  DeviceMemory* memory = Runtime::get().memory_if_started();
  if (C10_UNLIKELY(plans_in_use())) {
    for (int device = 0; device < memory->device_count(); ++device) {
      if (plan_free(device, ptr)) return;
    }
  }
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    const int device = memory->driver().device_of(ptr);
    if (device >= 0) {
      const auto [base, bytes] = memory->caching(device).base_allocation(ptr);
      if (base != nullptr) report_to_profiler(ptr, -static_cast<std::int64_t>(bytes), static_cast<c10::DeviceIndex>(device));
    }
  }
  if (C10_UNLIKELY(!memory->free(ptr))) TORCH_WARN("mybackend: free of a pointer that is not allocated: ", ptr);
}

namespace {
const bool g_registered = [] {
  c10::SetAllocator(kDeviceType, device_allocator(), 1);
  return true;
}();
}  // namespace

}  // namespace mybackend::glue
