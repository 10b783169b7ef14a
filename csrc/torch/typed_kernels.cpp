// Typed kernels: reductions, linear algebra, normalization, embedding, indexing, optimizers.
#include "torch/typed_borrow.h"

namespace mybackend::glue {

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  MYBACKEND_BORROW0(m, sum);
  MYBACKEND_BORROW(m, sum, dim_IntList);
  MYBACKEND_BORROW(m, sum, IntList_out);
  MYBACKEND_BORROW0(m, mean);
  MYBACKEND_BORROW(m, mean, dim);
  MYBACKEND_BORROW(m, mean, out);
  MYBACKEND_BORROW0(m, amax);
  MYBACKEND_BORROW(m, amax, out);
  MYBACKEND_BORROW0(m, amin);
  MYBACKEND_BORROW0(m, max);
  MYBACKEND_BORROW0(m, min);
  MYBACKEND_BORROW(m, max, dim);
  MYBACKEND_BORROW(m, min, dim);
  MYBACKEND_BORROW0(m, argmax);
  MYBACKEND_BORROW(m, var, correction);
  MYBACKEND_BORROW(m, var_mean, correction);
  MYBACKEND_BORROW0(m, cumsum);
  MYBACKEND_BORROW(m, any, dim);
  MYBACKEND_BORROW0(m, any);
  MYBACKEND_BORROW0(m, all);
  MYBACKEND_BORROW0(m, _softmax);
  MYBACKEND_BORROW0(m, _softmax_backward_data);
  MYBACKEND_BORROW0(m, _log_softmax);
  MYBACKEND_BORROW0(m, _log_softmax_backward_data);
  MYBACKEND_BORROW(m, linalg_vector_norm, out);
  MYBACKEND_BORROW0(m, linalg_vector_norm);
  MYBACKEND_BORROW0(m, topk);
  MYBACKEND_BORROW0(m, nll_loss_forward);
  MYBACKEND_BORROW0(m, nll_loss_backward);

  MYBACKEND_BORROW0(m, mm);
  MYBACKEND_BORROW(m, mm, out);
  MYBACKEND_BORROW0(m, bmm);
  MYBACKEND_BORROW(m, bmm, out);
  MYBACKEND_BORROW0(m, addmm);
  MYBACKEND_BORROW(m, addmm, out);
  MYBACKEND_BORROW0(m, addmm_);
  MYBACKEND_BORROW0(m, baddbmm);
  MYBACKEND_BORROW(m, baddbmm, out);
  MYBACKEND_BORROW0(m, baddbmm_);
  MYBACKEND_BORROW0(m, mv);
  MYBACKEND_BORROW0(m, dot);
  MYBACKEND_BORROW0(m, addmv);

  MYBACKEND_BORROW0(m, native_layer_norm);
  MYBACKEND_BORROW0(m, native_layer_norm_backward);
  MYBACKEND_BORROW0(m, native_group_norm);
  MYBACKEND_BORROW0(m, native_batch_norm);
  MYBACKEND_BORROW0(m, native_batch_norm_backward);
  MYBACKEND_BORROW0(m, convolution);
  MYBACKEND_BORROW0(m, convolution_backward);
  MYBACKEND_BORROW0(m, embedding);
  MYBACKEND_BORROW0(m, embedding_dense_backward);
  MYBACKEND_BORROW0(m, cat);
  MYBACKEND_BORROW(m, cat, out);
  MYBACKEND_BORROW0(m, index_select);
  MYBACKEND_BORROW0(m, gather);
  MYBACKEND_BORROW(m, scatter_, src);
  MYBACKEND_BORROW(m, scatter_, value);
  MYBACKEND_BORROW0(m, scatter_add_);
  MYBACKEND_BORROW0(m, index_add_);
  MYBACKEND_BORROW0(m, tril);
  MYBACKEND_BORROW0(m, triu);
  MYBACKEND_BORROW(m, arange, start_out);
  MYBACKEND_BORROW0(m, _local_scalar_dense);
  MYBACKEND_BORROW0(m, equal);
  MYBACKEND_BORROW0(m, _scaled_dot_product_flash_attention_for_cpu);
  MYBACKEND_BORROW0(m, _scaled_dot_product_flash_attention_for_cpu_backward);

  MYBACKEND_BORROW0(m, _fused_adam_);
  MYBACKEND_BORROW0(m, _fused_adamw_);
  MYBACKEND_BORROW0(m, _fused_sgd_);
  MYBACKEND_BORROW0(m, _fused_adagrad_);
}

}  // namespace mybackend::glue
