// Copies between the device and the CPU, and between devices.
//
// The bytes of a sim device are host memory, so the CPU's copy kernel does the work (layout,
// dtype, conjugation and all) on aliases. It runs when the earlier work of both devices'
// current streams is done.
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_ops.h>
#include <torch/library.h>

#include "torch/borrow.h"
#include "torch/typed_borrow.h"

namespace mybackend::glue {
namespace {

bool on_device(const at::Tensor& tensor) {
  return tensor.device().type() == kDeviceType;
}

void check_copyable(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(on_device(tensor) || tensor.is_cpu(), "mybackend cannot copy from or to a tensor on ", tensor.device());
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided, "mybackend cannot copy a tensor of layout ", tensor.layout());
}

at::Tensor& copy_aliases(at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
  constexpr c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  // One frame for each device. They are opened in this order, and must end in the opposite one.
  BorrowFrame src_frame("aten::copy_");
  BorrowFrame dst_frame("aten::copy_");
  const bool same_device = on_device(dst) && on_device(src) && dst.device() == src.device();
  const at::Tensor* src_alias = &src;
  const at::Tensor* dst_alias = &dst;
  if (on_device(src) && !same_device) {
    src_frame.see(src);
    src_frame.open();
    src_alias = &src_frame.alias(src);
  }
  if (on_device(dst)) {
    dst_frame.see(dst);
    dst_frame.open();
    dst_alias = &dst_frame.alias(dst, true);
    if (same_device) src_alias = &dst_frame.alias(src);
  }
  at::_ops::copy_::redispatch(cpu, const_cast<at::Tensor&>(*dst_alias), *src_alias, non_blocking);
  return dst;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  check_copyable(self);
  check_copyable(dst);
  at::Tensor target = dst;
  copy_aliases(target, self, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::Tensor target = dst;
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (C10_UNLIKELY(self.is_same(src))) return self;
  check_copyable(src);
  return copy_aliases(self, src, non_blocking);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("copy_", TORCH_FN(copy_));
}

}  // namespace mybackend::glue
