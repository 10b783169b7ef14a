#include "torch/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <mutex>

#include "core/cpu_allocator.h"
#include "torch/context.h"
#include "torch/device_allocator.h"
#include "torch/plan.h"

namespace mybackend::glue {

MYBACKEND_HOT_THREAD_LOCAL c10::DeviceIndex BorrowScope::t_device = -1;

namespace {

c10::Allocator* g_original = nullptr;
std::atomic<int> g_pooling_count{0};
std::atomic<bool> g_was_pooling{false};  // some living blocks may be pooled ones

c10::DataPtr allocate_pooled(std::size_t nbytes);

void delete_pooled(void* ptr) {
  if (ptr == nullptr) return;
  if (C10_UNLIKELY(plans_in_use()) && plan_free(-1, ptr)) return;
  c10::profiledCPUMemoryReporter().Delete(ptr);
  cpu_allocator::deallocate(ptr);
}

// raw_deallocate() does not say which allocator a pointer came from, and may be called when no
// kernel is borrowed any more (oneDNN frees its scratch memory so): ask the address.
void raw_delete(void* ptr) {
  DeviceMemory* memory = Runtime::get().memory_if_started();
  if (memory != nullptr && memory->owns(ptr))
    delete_device_bytes(ptr);
  else if (g_was_pooling.load(std::memory_order_relaxed))
    delete_pooled(ptr);  // knows the system's blocks too
  else
    g_original->raw_deleter()(ptr);
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::DeviceIndex device = BorrowScope::device();
    if (C10_UNLIKELY(device >= 0)) return allocate_device_bytes(device, nbytes, c10::Device(c10::DeviceType::CPU));
    if (g_pooling_count.load(std::memory_order_relaxed) > 0) return allocate_pooled(nbytes);
    return g_original->allocate(nbytes);
  }

  c10::DeleterFnPtr raw_deleter() const override { return g_original->raw_deleter() != nullptr ? &raw_delete : nullptr; }

  void copy_data(void* dst, const void* src, std::size_t nbytes) const override { default_copy_data(dst, src, nbytes); }

  bool is_simple_data_ptr(const c10::DataPtr& ptr) const override {
    return ptr.get_deleter() == &delete_device_bytes || ptr.get_deleter() == &delete_pooled || g_original->is_simple_data_ptr(ptr);
  }
};

c10::DataPtr allocate_pooled(std::size_t nbytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (nbytes == 0) return {nullptr, nullptr, &delete_pooled, cpu};
  if (C10_UNLIKELY(plans_in_use())) {
    if (void* place = plan_allocate(-1, nbytes, 0)) return {place, place, &delete_pooled, cpu};
  }
  void* ptr = cpu_allocator::allocate(nbytes);
  if (C10_UNLIKELY(ptr == nullptr)) {
    c10::profiledCPUMemoryReporter().OutOfMemory(nbytes);
    const TrackerStats stats = cpu_allocator::tracker().stats();
    TORCH_CHECK_WITH(OutOfMemoryError, false, "mybackend: the system has no ", nbytes, " bytes for a CPU tensor, with all caches emptied (",
                     stats.current_bytes, " bytes are live, ", stats.peak_bytes, " were at the peak)");
  }
  if (C10_UNLIKELY(plans_in_use())) plan_on_allocate(-1, ptr, nbytes);
  c10::profiledCPUMemoryReporter().New(ptr, nbytes);
  return {ptr, ptr, &delete_pooled, cpu};
}

CpuAllocator& instance() {
  static auto* allocator = new CpuAllocator;
  return *allocator;
}

}  // namespace

void install_cpu_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    g_original = c10::GetAllocator(c10::DeviceType::CPU);
    constexpr std::uint8_t kPriority = 100;  // above the default allocator's, below a user's own
    c10::SetAllocator(c10::DeviceType::CPU, &instance(), kPriority);
  });
}

void install_pooling() {
  install_cpu_allocator();
  TORCH_CHECK(c10::GetAllocator(c10::DeviceType::CPU) == &instance(),
              "mybackend.cpu.install(): another CPU allocator was put in place with a higher priority");
  g_was_pooling.store(true);
  g_pooling_count.fetch_add(1);
}

void uninstall_pooling() {
  int count = g_pooling_count.load();
  do {
    TORCH_CHECK(count > 0, "mybackend.cpu.uninstall(): it is not installed");
  } while (!g_pooling_count.compare_exchange_weak(count, count - 1));
}

bool is_pooling() noexcept {
  return g_pooling_count.load() > 0;
}

}  // namespace mybackend::glue
