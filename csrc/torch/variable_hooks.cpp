// `t.data = other` across the CPU and the device. Core refuses it for PrivateUse1, since its
// list of dense backends is fixed; and with it nn.Module.to() would replace every parameter
// object. This wraps core's hooks and takes that one case.
#include <ATen/core/VariableHooksInterface.h>
#include <torch/csrc/autograd/variable.h>

#include "torch/context.h"

namespace mybackend::glue {
namespace {

class DataHooks final : public at::impl::VariableHooksInterface {
 public:
  explicit DataHooks(at::impl::VariableHooksInterface* core) : core_(core) {}

  void set_data(const at::TensorBase& self, const at::TensorBase& data) const override {
    const auto dense = [](const at::TensorBase& t) {
      return t.layout() == c10::kStrided && (t.is_cpu() || t.device().type() == kDeviceType);
    };
    const bool one_on_device = self.device().type() == kDeviceType || data.device().type() == kDeviceType;
    if (!one_on_device || !dense(self) || !dense(data)) return core_->set_data(self, data);
    TORCH_CHECK(!self.requires_grad() || torch::autograd::isDifferentiableType(at::typeMetaToScalarType(data.dtype())),
                "data set to a tensor that requires gradients must be floating point or complex dtype");
    if (auto* meta = torch::autograd::impl::get_autograd_meta(self)) {
      // An accumulator made for the old device or type would accumulate gradients of the old kind.
      std::lock_guard lock(meta->mutex_);
      if (auto accumulator = meta->grad_accumulator_.lock()) {
        if (self.device() != data.device() || self.dtype() != data.dtype()) meta->grad_accumulator_.reset();
      }
    }
    self.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
  }

  at::TensorBase tensor_data(const at::TensorBase& t) const override { return core_->tensor_data(t); }
  at::TensorBase variable_data(const at::TensorBase& t) const override { return core_->variable_data(t); }
  const c10::intrusive_ptr<torch::autograd::Node>& grad_fn(const at::TensorBase& t) const override { return core_->grad_fn(t); }
  unsigned _register_hook(const at::TensorBase& t, std::function<at::TensorBase(const at::TensorBase&)> hook) const override {
    return core_->_register_hook(t, std::move(hook));
  }
  void remove_hook(const at::TensorBase& t, unsigned pos) const override { core_->remove_hook(t, pos); }
  bool is_view(const at::TensorBase& t) const override { return core_->is_view(t); }
  const at::TensorBase& base(const at::TensorBase& t) const override { return core_->base(t); }
  const std::string& name(const at::TensorBase& t) const override { return core_->name(t); }
  bool is_leaf(const at::TensorBase& t) const override { return core_->is_leaf(t); }
  std::int64_t output_nr(const at::TensorBase& t) const override { return core_->output_nr(t); }
  at::TensorBase data(const at::TensorBase& t) const override { return core_->data(t); }
  std::int64_t _version(const at::TensorBase& t) const override { return core_->_version(t); }
  void retain_grad(const at::TensorBase& t) const override { core_->retain_grad(t); }
  bool retains_grad(const at::TensorBase& t) const override { return core_->retains_grad(t); }
  void _backward(const at::Tensor& t, at::TensorList inputs, const std::optional<at::Tensor>& gradient, std::optional<bool> keep_graph,
                 bool create_graph) const override {
    core_->_backward(t, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const at::TensorBase& t, bool value) const override { core_->requires_grad_(t, value); }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    core_->basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const at::TensorBase& t) const override { return core_->grad_dtype(t); }
  void set_grad_dtype(const at::TensorBase& t, const std::optional<c10::ScalarType>& dtype) const override {
    core_->set_grad_dtype(t, dtype);
  }

 private:
  at::impl::VariableHooksInterface* const core_;
};

const bool g_registered = [] {
  at::impl::SetVariableHooks(new DataHooks(at::impl::GetVariableHooks()));
  return true;
}();

}  // namespace
}  // namespace mybackend::glue
