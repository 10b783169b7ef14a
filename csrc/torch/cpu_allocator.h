// PyTorch's CPU allocator, replaced. It serves each request in one of three ways:
//
//   borrowed  while a BorrowScope lives on the thread: from the device's memory, so that what a
//             borrowed CPU kernel allocates (outputs, temporaries) can be adopted without a copy
//             and is counted
//   pooled    between install_pooling() and uninstall_pooling(): core/cpu_allocator.h
//   original  else: by the allocator that was there before, untouched
//
// A block is freed by whoever made it, whatever is in force then.
#pragma once

#include <c10/core/Allocator.h>

#include "base/thread_local.h"
#include "driver/driver.h"

namespace mybackend::glue {

// Puts this allocator in place of PyTorch's; idempotent. Called when the devices start.
void install_cpu_allocator();

// Pooled service of ordinary CPU requests, counted: each install needs an uninstall. Throws
// when somebody put another CPU allocator over this one.
void install_pooling();
void uninstall_pooling();
bool is_pooling() noexcept;

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
