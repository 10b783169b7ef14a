// A mutex for critical sections of tens of nanoseconds: one atomic exchange to take it, one to
// leave it, no function call. Waiters sleep in the kernel. Not recursive. Satisfies Lockable.
#pragma once

#include <atomic>

namespace mybackend {

class Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() noexcept {
    int expected = kFree;
    if (!state_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire, std::memory_order_relaxed)) wait();
  }
  bool try_lock() noexcept {
    int expected = kFree;
    return state_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire, std::memory_order_relaxed);
  }
  void unlock() noexcept {
    if (state_.exchange(kFree, std::memory_order_release) == kContended) state_.notify_one();
  }

 private:
  static constexpr int kFree = 0, kHeld = 1, kContended = 2;  // contended: someone may sleep

  [[gnu::noinline]] void wait() noexcept {
    for (int spin = 0; spin < 64; ++spin) {
      if (state_.load(std::memory_order_relaxed) == kFree && try_lock()) return;
    }
    while (state_.exchange(kContended, std::memory_order_acquire) != kFree) {
      state_.wait(kContended, std::memory_order_relaxed);
    }
  }

  std::atomic<int> state_{kFree};
};

}  // namespace mybackend
