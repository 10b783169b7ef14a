// Borrowed compute: run a kernel of the lender (lender.h: the CPU, or CUDA) on the very bytes of
// `mybackend` tensors.
//
//   alias     a tensor of the lender over the bytes of a device tensor. Its TensorImpl and StorageImpl
//             ("shell") are kept per thread and used again, so that an alias costs a few stores
//   frame     one borrowed call: its aliases, its LendingScope, and the way back: results are
//             adopted (relabelled as device tensors, no copy), what the kernel did to the size
//             or storage of an argument is carried over to the argument
//   escape    a shell that is still referenced after the call (a view was returned, or the
//             kernel kept it) is not used again, and keeps its base's storage alive
//
// A frame lives on one thread, and frames nest like the calls.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <unordered_map>

#include "torch/context.h"
#include "torch/lender.h"

namespace mybackend::glue {

// How often a borrowed kernel's output could not be adopted and was copied instead, since the
// process began. Zero is the normal case.
std::int64_t copied_output_count() noexcept;

// A device tensor that owns the bytes of a tensor of the lender together with it: both live on.
// Used where an autograd graph of the lender's keeps its tensors.
at::Tensor share_as_device(const at::Tensor& lent, c10::DeviceIndex device);
// A tensor of the lender over the bytes of a device tensor; keeps the storage alive. No autograd link.
at::Tensor share_as_lender(const at::Tensor& device_tensor);

class BorrowFrame {
 public:
  explicit BorrowFrame(const char* operator_name) noexcept : operator_name_(operator_name) {}
  ~BorrowFrame();
  BorrowFrame(const BorrowFrame&) = delete;
  BorrowFrame& operator=(const BorrowFrame&) = delete;

  // --- Before the call: see every tensor argument once ------------------------------------
  // Throws, as CUDA does, when the arguments are on different devices. CPU tensors are let
  // through when they have no dimensions and are not written to, or cpu_allowed.
  void see(const at::Tensor& tensor, bool is_written = false, bool cpu_allowed = false) {
    if (!tensor.defined()) return;
    const c10::Device device = tensor.device();
    if (C10_LIKELY(device.type() == kDeviceType)) {
      if (device_ < 0)
        device_ = device.index();
      else if (C10_UNLIKELY(device.index() != device_))
        see_other(tensor, is_written, cpu_allowed);
    } else {
      see_other(tensor, is_written, cpu_allowed);
    }
  }
  void see_device(c10::DeviceIndex device) {
    if (device_ < 0) device_ = device;
  }
  c10::DeviceIndex device() const noexcept { return device_; }

  // After the last see(): throws when a device tensor met a CPU tensor with dimensions.
  void check_devices() const {
    if (C10_UNLIKELY(cpu_with_dimensions_ && device_ >= 0)) different_devices(c10::Device(c10::DeviceType::CPU));
  }

  // check_devices(), then opens the scope; where the host computes, waits for the stream first.
  void open();

  // The alias of an argument; the argument itself when it is not on the device.
  //
  // The reference stays valid, and the alias the frame's, until the frame ends. `tensor` must
  // live as long. `may_change`: a kernel may change its bytes although its schema does not say so.
  const at::Tensor& alias(const at::Tensor& tensor, bool is_written = false, bool may_change = false);
  // Carries changes of size, storage and offset back to the written arguments.
  void write_back();
  // A result as the caller must see it. The tensor itself is changed where possible.
  at::Tensor adopt(at::Tensor&& result);
  // The argument whose alias this is, or nullptr.
  const at::Tensor* argument_of(const at::Tensor& alias) noexcept;

 private:
  struct Alias {
    c10::TensorImpl* shell;
    c10::StorageImpl* shell_storage;  // null: shares an earlier alias's, or has none
    const at::Tensor* base;
    c10::StorageImpl* base_storage;
    void* data;
    std::size_t nbytes;
    bool is_written;
  };

  // The first alias whose base storage, shell or shell storage is `key`, or nullptr. A scan for the
  // few arguments of most operators, a table for the long lists of the foreach ones.
  Alias* find(const void* key) noexcept;
  Alias* find_base(const c10::TensorImpl* base) noexcept;
  // Gives a lazily cloned storage bytes of its own, and the alias that reads it the same.
  void set_data(Alias& alias, c10::StorageImpl* base_storage);
  void index(std::size_t position);

  void see_other(const at::Tensor& tensor, bool is_written, bool cpu_allowed);
  [[noreturn]] void different_devices(c10::Device other) const;
  void write_back_storage(Alias& alias);
  void adopt_storage(c10::TensorImpl* result);

  const char* const operator_name_;
  c10::DeviceIndex device_ = -1;
  c10::Device lender_{c10::DeviceType::CPU};  // where the aliases are
  bool cpu_with_dimensions_ = false;
  bool opened_ = false;
  std::int64_t profiled_from_ns_ = 0;  // 0: no profile
  std::size_t pool_base_ = 0;
  static constexpr std::size_t kScanned = 32;
  c10::SmallVector<Alias, 6> aliases_;
  std::unique_ptr<std::unordered_map<const void*, std::size_t>> positions_;  // once there are more than kScanned
  c10::SmallVector<const c10::TensorImpl*, 2> cpu_arguments_;
  alignas(LendingScope) unsigned char scope_[sizeof(LendingScope)];
  alignas(c10::impl::ExcludeDispatchKeyGuard) unsigned char guard_[sizeof(c10::impl::ExcludeDispatchKeyGuard)];
};

}  // namespace mybackend::glue
