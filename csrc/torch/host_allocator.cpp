#include "torch/host_allocator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <bit>

#include "core/pinned_cache.h"
#include "torch/context.h"

namespace mybackend::glue {
namespace {

PinnedCache& pinned() {
  return Runtime::get().pinned();
}

void delete_pinned(void* ptr) {
  if (ptr == nullptr) return;
  if (!pinned().free(ptr)) TORCH_WARN("mybackend: free of a pointer that is not pinned memory: ", ptr);
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (nbytes == 0) return {nullptr, nullptr, &delete_pinned, cpu};
    void* ptr = pinned().allocate(nbytes);
    TORCH_CHECK_WITH(OutOfMemoryError, ptr != nullptr, "mybackend: the system has no ", nbytes, " bytes for pinned memory (",
                     pinned().stats().reserved_bytes.current, " bytes are pinned, nothing is cached any more)");
    return {ptr, ptr, &delete_pinned, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_pinned; }
  void copy_data(void* dst, const void* src, std::size_t nbytes) const override { default_copy_data(dst, src, nbytes); }

  bool record_event(void* ptr, void*, c10::Stream stream) override { return record_pinned_use(ptr, stream); }
  void empty_cache() override { pinned().empty_cache(); }

  at::HostStats get_stats() override {
    const PinnedStats from = pinned().stats();
    at::HostStats to;
    const auto copy = [](const PinnedCounter& from, c10::CachingAllocator::Stat* to) {
      to->current = from.current;
      to->peak = from.peak;
      to->allocated = from.allocated;
      to->freed = from.freed;
    };
    copy(from.active_requests, &to.active_requests);
    copy(from.active_bytes, &to.active_bytes);
    copy(from.segments, &to.allocations);
    copy(from.reserved_bytes, &to.allocated_bytes);
    const auto copy_time = [](const PinnedDuration& from, c10::CachingAllocator::DurationStat* to) {
      to->total = from.total;
      to->max = from.max;
      to->min = from.min;
      to->count = from.count;
    };
    copy_time(from.host_alloc_us, &to.host_alloc_time);
    copy_time(from.host_free_us, &to.host_free_time);
    to.num_host_alloc = from.host_alloc_us.count;
    to.num_host_free = from.host_free_us.count;
    for (const auto& [bytes, count] : pinned().class_counts()) {  // the buckets are powers of two
      const auto bucket = static_cast<std::size_t>(std::bit_width(bytes - 1));
      if (bucket < to.bucket_allocation.size()) to.bucket_allocation[bucket] += count;
    }
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

bool record_pinned_use(const void* ptr, c10::Stream stream) {
  if (stream.device_type() != kDeviceType) return false;
  return pinned().record_use(ptr, &memory().driver(), stream.device_index(), to_handle(stream));
}

bool is_own_pinned_pointer(const void* ptr) noexcept {
  return pinned().contains(ptr);
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
