#include "torch/host_allocator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "core/pinned_memory.h"
#include "torch/context.h"

namespace mybackend::glue {
namespace {

PinnedMemory& pinned() {
  return Runtime::get().pinned();
}

void delete_pinned(void* ptr) {
  // Asynchronous copies run to their end before their memory goes.
  if (DeviceMemory* memory = Runtime::get().memory_if_started()) {
    for (int device = 0; device < memory->device_count(); ++device) {
      if (memory->driver().maybe_busy(device)) (void)memory->driver().device_synchronize(device);
    }
  }
  pinned().free(ptr);
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (nbytes == 0) return {nullptr, nullptr, &delete_pinned, cpu};
    void* ptr = pinned().allocate(nbytes);
    TORCH_CHECK_WITH(OutOfMemoryError, ptr != nullptr, "mybackend: the system has no ", nbytes, " bytes for pinned memory (",
                     pinned().stats().current_bytes, " bytes are pinned)");
    return {ptr, ptr, &delete_pinned, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_pinned; }
  void copy_data(void* dst, const void* src, std::size_t nbytes) const override { default_copy_data(dst, src, nbytes); }

  bool record_event(void* ptr, void*, c10::Stream) override { return pinned().contains(ptr); }  // a free waits for the device
  void empty_cache() override {}                                                                // nothing is cached

  at::HostStats get_stats() override {
    const PinnedStats from = pinned().stats();
    at::HostStats to;
    const auto fill = [](c10::CachingAllocator::Stat* stat, std::int64_t current, std::int64_t peak, std::int64_t allocated,
                         std::int64_t freed) {
      stat->current = current;
      stat->peak = peak;
      stat->allocated = allocated;
      stat->freed = freed;
    };
    for (auto* stat : {&to.active_bytes, &to.allocated_bytes}) {
      fill(stat, from.current_bytes, from.peak_bytes, from.total_allocated_bytes, from.total_freed_bytes);
    }
    for (auto* stat : {&to.active_requests, &to.allocations}) {
      fill(stat, from.current_blocks, from.peak_blocks, from.allocation_count, from.free_count);
    }
    to.num_host_alloc = from.allocation_count;
    to.num_host_free = from.free_count;
    return to;
  }
  void reset_accumulated_stats() override { pinned().reset_accumulated(); }
  void reset_peak_stats() override { pinned().reset_peak(); }
};

PinnedAllocator& instance() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &instance())

}  // namespace

c10::Allocator* host_allocator() noexcept {
  return &instance();
}

bool is_pinned_pointer(const void* ptr) noexcept {
  if (pinned().contains(ptr)) return true;
  try {
    return at::detail::getCUDAHooks().isPinnedPtr(ptr);
  } catch (...) {
    return false;
  }
}

}  // namespace mybackend::glue
