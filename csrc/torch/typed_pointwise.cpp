// Typed kernels: elementwise operators, comparisons, activations and their backwards.
#include "torch/typed_borrow.h"

namespace mybackend::glue {

// The three variants that most elementwise operators have: name, name_, name.out.
#define MYBACKEND_UNARY(m, name) \
  MYBACKEND_BORROW0(m, name);    \
  MYBACKEND_BORROW0(m, name##_); \
  MYBACKEND_BORROW(m, name, out)

// name.overload, name_.overload, name.out_overload.
#define MYBACKEND_BINARY(m, name, overload, out_overload) \
  MYBACKEND_BORROW(m, name, overload);                    \
  MYBACKEND_BORROW(m, name##_, overload);                 \
  MYBACKEND_BORROW(m, name, out_overload)

#define MYBACKEND_COMPARISON(m, name)            \
  MYBACKEND_BINARY(m, name, Tensor, Tensor_out); \
  MYBACKEND_BINARY(m, name, Scalar, Scalar_out)

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  MYBACKEND_BINARY(m, add, Tensor, out);
  MYBACKEND_BINARY(m, sub, Tensor, out);
  MYBACKEND_BINARY(m, mul, Tensor, out);
  MYBACKEND_BINARY(m, div, Tensor, out);
  MYBACKEND_BINARY(m, div, Tensor_mode, out_mode);
  MYBACKEND_BORROW(m, rsub, Tensor);
  MYBACKEND_BORROW0(m, maximum);
  MYBACKEND_BORROW(m, maximum, out);
  MYBACKEND_BORROW0(m, minimum);
  MYBACKEND_BORROW(m, minimum, out);
  MYBACKEND_BORROW(m, pow, Tensor_Tensor);
  MYBACKEND_BORROW(m, pow_, Tensor);
  MYBACKEND_BORROW(m, pow, Tensor_Tensor_out);
  MYBACKEND_BORROW(m, atan2, out);
  MYBACKEND_BORROW0(m, atan2);
  MYBACKEND_BORROW(m, where, self);
  MYBACKEND_BORROW(m, where, self_out);

  MYBACKEND_COMPARISON(m, eq);
  MYBACKEND_COMPARISON(m, ne);
  MYBACKEND_COMPARISON(m, lt);
  MYBACKEND_COMPARISON(m, le);
  MYBACKEND_COMPARISON(m, gt);
  MYBACKEND_COMPARISON(m, ge);
  MYBACKEND_BINARY(m, bitwise_and, Tensor, Tensor_out);
  MYBACKEND_BINARY(m, bitwise_or, Tensor, Tensor_out);
  MYBACKEND_BORROW0(m, logical_not);
  MYBACKEND_BORROW(m, logical_not, out);
  MYBACKEND_UNARY(m, bitwise_not);

  MYBACKEND_UNARY(m, neg);
  MYBACKEND_UNARY(m, exp);
  MYBACKEND_UNARY(m, exp2);
  MYBACKEND_UNARY(m, expm1);
  MYBACKEND_UNARY(m, log);
  MYBACKEND_UNARY(m, log2);
  MYBACKEND_UNARY(m, log10);
  MYBACKEND_UNARY(m, log1p);
  MYBACKEND_UNARY(m, sqrt);
  MYBACKEND_UNARY(m, rsqrt);
  MYBACKEND_UNARY(m, reciprocal);
  MYBACKEND_UNARY(m, sin);
  MYBACKEND_UNARY(m, cos);
  MYBACKEND_UNARY(m, tan);
  MYBACKEND_UNARY(m, tanh);
  MYBACKEND_UNARY(m, sigmoid);
  MYBACKEND_UNARY(m, erf);
  MYBACKEND_UNARY(m, erfc);
  MYBACKEND_UNARY(m, floor);
  MYBACKEND_UNARY(m, ceil);
  MYBACKEND_UNARY(m, round);
  MYBACKEND_UNARY(m, trunc);
  MYBACKEND_UNARY(m, sign);
  MYBACKEND_BORROW0(m, abs);
  MYBACKEND_BORROW0(m, abs_);
  MYBACKEND_BORROW(m, abs, out);
  MYBACKEND_BORROW(m, pow, Tensor_Scalar);
  MYBACKEND_BORROW(m, pow_, Scalar);
  MYBACKEND_BORROW(m, pow, Tensor_Scalar_out);
  MYBACKEND_BORROW0(m, isnan);

  MYBACKEND_BORROW0(m, relu);
  MYBACKEND_BORROW0(m, relu_);
  MYBACKEND_UNARY(m, gelu);
  MYBACKEND_UNARY(m, silu);
  MYBACKEND_UNARY(m, leaky_relu);
  MYBACKEND_UNARY(m, elu);
  MYBACKEND_UNARY(m, hardtanh);
  MYBACKEND_UNARY(m, clamp);
  MYBACKEND_UNARY(m, clamp_min);
  MYBACKEND_BORROW0(m, threshold_backward);
  MYBACKEND_BORROW(m, threshold_backward, grad_input);
  MYBACKEND_BORROW0(m, gelu_backward);
  MYBACKEND_BORROW0(m, silu_backward);
  MYBACKEND_BORROW0(m, sigmoid_backward);
  MYBACKEND_BORROW0(m, tanh_backward);
  MYBACKEND_BORROW0(m, leaky_relu_backward);
  MYBACKEND_BORROW0(m, elu_backward);
  MYBACKEND_BORROW0(m, hardtanh_backward);

  MYBACKEND_UNARY(m, addcmul);
  MYBACKEND_UNARY(m, addcdiv);
  MYBACKEND_BINARY(m, lerp, Scalar, Scalar_out);
  MYBACKEND_BINARY(m, lerp, Tensor, Tensor_out);
  MYBACKEND_BORROW(m, fill_, Scalar);
  MYBACKEND_BORROW(m, fill_, Tensor);
  MYBACKEND_BORROW0(m, zero_);
  MYBACKEND_BORROW(m, masked_fill_, Scalar);
  MYBACKEND_BORROW(m, masked_fill_, Tensor);
  MYBACKEND_BORROW(m, masked_fill, Scalar);
  MYBACKEND_BORROW(m, bernoulli_, float);
  MYBACKEND_BORROW0(m, uniform_);
  MYBACKEND_BORROW0(m, normal_);
  MYBACKEND_BORROW(m, random_, from);
  MYBACKEND_BORROW0(m, random_);
}

}  // namespace mybackend::glue
