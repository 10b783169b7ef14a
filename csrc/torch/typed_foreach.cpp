// Typed kernels: the foreach operators that optimizers and gradient clipping use. On the CPU they
// are loops over the list; borrowed as a whole, the loop runs on aliases and each step costs what
// it costs on the CPU.
#include "torch/typed_borrow.h"

namespace mybackend::glue {
namespace {

// Whether all tensors of the lists are on one of our devices.
struct OneDevice {
  c10::DeviceIndex device = -1;
  bool is_one = true;

  void look(at::TensorList tensors) {
    for (const at::Tensor& tensor : tensors) {
      const bool ours = tensor.device().type() == kDeviceType;
      if (device < 0 && ours) device = tensor.device().index();
      is_one = is_one && ours && tensor.device().index() == device;
    }
  }
  template <class Other>
  void look(const Other&) {}
};

template <class Op, class Schema = typename Op::schema>
struct Foreach;

template <class Op, class R, class... A>
struct Foreach<Op, R(A...)> {
  static R call(A... arguments) {
    OneDevice devices;
    (devices.look(arguments), ...);
    if (C10_LIKELY(devices.is_one)) return Typed<Op>::call(std::forward<A>(arguments)...);
    // Lists over several devices: the loop itself, whose steps find their own device.
    return Op::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<A>(arguments)...);
  }
};

}  // namespace

#define MYBACKEND_FOREACH(m, name, overload) m.impl(#name "." #overload, TORCH_FN((&Foreach<at::_ops::name##_##overload>::call)))
#define MYBACKEND_FOREACH0(m, name) m.impl(#name, TORCH_FN((&Foreach<at::_ops::name>::call)))
#define MYBACKEND_FOREACH_BINARY(m, name) \
  MYBACKEND_FOREACH(m, name, Scalar);     \
  MYBACKEND_FOREACH(m, name##_, Scalar);  \
  MYBACKEND_FOREACH(m, name, List);       \
  MYBACKEND_FOREACH(m, name##_, List);    \
  MYBACKEND_FOREACH(m, name, ScalarList); \
  MYBACKEND_FOREACH(m, name##_, ScalarList)
#define MYBACKEND_FOREACH_TERNARY(m, name) \
  MYBACKEND_FOREACH(m, name, Scalar);      \
  MYBACKEND_FOREACH(m, name##_, Scalar);   \
  MYBACKEND_FOREACH(m, name, ScalarList);  \
  MYBACKEND_FOREACH(m, name##_, ScalarList)
#define MYBACKEND_FOREACH_UNARY(m, name) \
  MYBACKEND_FOREACH0(m, name);           \
  MYBACKEND_FOREACH0(m, name##_)

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  MYBACKEND_FOREACH_BINARY(m, _foreach_add);
  MYBACKEND_FOREACH_BINARY(m, _foreach_sub);
  MYBACKEND_FOREACH_BINARY(m, _foreach_mul);
  MYBACKEND_FOREACH_BINARY(m, _foreach_div);
  MYBACKEND_FOREACH_TERNARY(m, _foreach_addcmul);
  MYBACKEND_FOREACH_TERNARY(m, _foreach_addcdiv);
  MYBACKEND_FOREACH(m, _foreach_lerp, Scalar);
  MYBACKEND_FOREACH(m, _foreach_lerp_, Scalar);
  MYBACKEND_FOREACH_UNARY(m, _foreach_sqrt);
  MYBACKEND_FOREACH_UNARY(m, _foreach_neg);
  MYBACKEND_FOREACH_UNARY(m, _foreach_abs);
  MYBACKEND_FOREACH_UNARY(m, _foreach_reciprocal);
  MYBACKEND_FOREACH(m, _foreach_norm, Scalar);
  MYBACKEND_FOREACH0(m, _foreach_zero_);
}

}  // namespace mybackend::glue
