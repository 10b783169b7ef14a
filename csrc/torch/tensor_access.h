// Access to the parts of a TensorImpl that a tensor of another device differs in. TensorImpl
// keeps them protected; this is the one place that knows them.
#pragma once

#include <c10/core/TensorImpl.h>

#include "torch/lender.h"

namespace mybackend::glue {

class TensorAccess final : public c10::TensorImpl {
 public:
  static c10::Storage& storage(c10::TensorImpl* impl) { return impl->*(&TensorAccess::storage_); }
  static c10::DispatchKeySet& keys(c10::TensorImpl* impl) { return impl->*(&TensorAccess::key_set_); }
  static std::optional<c10::Device>& device(c10::TensorImpl* impl) { return impl->*(&TensorAccess::device_opt_); }
  // Sizes, strides, offset, dtype and the flags derived from them.
  static void copy_geometry(const c10::TensorImpl* from, c10::TensorImpl* to) { copy_generic_tensor_metadata(from, to); }

  TensorAccess() = delete;
};

// The keys of an alias: the lender's backend in place of ours.
inline c10::DispatchKeySet to_lender_keys(c10::DispatchKeySet device_keys) {
  constexpr c10::DispatchKeySet cpu(c10::BackendComponent::CPUBit), cuda(c10::BackendComponent::CUDABit);
  c10::DispatchKeySet keys = device_keys.remove_backend(c10::BackendComponent::PrivateUse1Bit) | (on_gpu() ? cuda : cpu);
  keys = keys - c10::python_ks;
  if (keys.has(c10::DispatchKey::AutocastPrivateUse1)) {
    keys =
        keys.remove(c10::DispatchKey::AutocastPrivateUse1).add(on_gpu() ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU);
  }
  return keys;
}

inline c10::DispatchKeySet to_device_keys(c10::DispatchKeySet lender_keys) {
  constexpr c10::DispatchKeySet ours(c10::BackendComponent::PrivateUse1Bit);
  c10::DispatchKeySet keys = on_gpu() ? lender_keys.remove_backend(c10::BackendComponent::CUDABit) | ours
                                      : lender_keys.remove_backend(c10::BackendComponent::CPUBit) | ours;
  constexpr c10::DispatchKeySet autocast({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
  if (keys.has_any(autocast)) keys = (keys - autocast).add(c10::DispatchKey::AutocastPrivateUse1);
  return keys;
}

}  // namespace mybackend::glue
