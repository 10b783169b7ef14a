// The CPU allocator while a kernel is borrowed.
//
// A CPU kernel that runs on the bytes of `mybackend` tensors allocates its outputs and
// temporaries through PyTorch's CPU allocator. While a BorrowScope lives on a thread, those
// allocations come from the device's memory instead, so that outputs can be adopted without a
// copy and everything is counted. At all other times, and on other threads, the allocator that
// was there before serves, untouched.
#pragma once

#include <c10/core/Allocator.h>

#include "base/thread_local.h"
#include "driver/driver.h"

namespace mybackend::glue {

// Idempotent; called when the devices start.
void install_borrowing_cpu_allocator();

class BorrowScope {
 public:
  explicit BorrowScope(c10::DeviceIndex device) noexcept : previous_(t_device) { t_device = device; }
  ~BorrowScope() { t_device = previous_; }
  BorrowScope(const BorrowScope&) = delete;
  BorrowScope& operator=(const BorrowScope&) = delete;

  // The device that CPU allocations of this thread come from, or -1.
  static c10::DeviceIndex device() noexcept { return t_device; }

 private:
  static MYBACKEND_HOT_THREAD_LOCAL c10::DeviceIndex t_device;
  const c10::DeviceIndex previous_;
};

}  // namespace mybackend::glue
