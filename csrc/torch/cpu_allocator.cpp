#include "torch/cpu_allocator.h"

#include <mutex>

#include "torch/context.h"
#include "torch/device_allocator.h"

namespace mybackend::glue {

MYBACKEND_HOT_THREAD_LOCAL c10::DeviceIndex BorrowScope::t_device = -1;

namespace {

c10::Allocator* g_original = nullptr;

// raw_deallocate() does not say which allocator a pointer came from, and may be called when no
// kernel is borrowed any more (oneDNN frees its scratch memory so): ask the address.
void raw_delete(void* ptr) {
  DeviceMemory* memory = Runtime::get().memory_if_started();
  if (memory != nullptr && memory->owns(ptr))
    delete_device_bytes(ptr);
  else
    g_original->raw_deleter()(ptr);
}

class BorrowingCpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::DeviceIndex device = BorrowScope::device();
    if (C10_LIKELY(device < 0)) return g_original->allocate(nbytes);
    return allocate_device_bytes(device, nbytes, c10::Device(c10::DeviceType::CPU));
  }

  c10::DeleterFnPtr raw_deleter() const override { return g_original->raw_deleter() != nullptr ? &raw_delete : nullptr; }

  void copy_data(void* dst, const void* src, std::size_t nbytes) const override { default_copy_data(dst, src, nbytes); }

  bool is_simple_data_ptr(const c10::DataPtr& ptr) const override {
    return ptr.get_deleter() == &delete_device_bytes || g_original->is_simple_data_ptr(ptr);
  }
};

}  // namespace

void install_borrowing_cpu_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    g_original = c10::GetAllocator(c10::DeviceType::CPU);
    static auto* allocator = new BorrowingCpuAllocator;
    constexpr std::uint8_t kPriority = 100;  // above the default allocator's, below a user's own
    c10::SetAllocator(c10::DeviceType::CPU, allocator, kPriority);
  });
}

}  // namespace mybackend::glue
