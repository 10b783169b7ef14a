// Operators that ATen would send another way for this device than for the CPU, before any
// kernel is reached. Here the outer operator is taken, so that the CPU's own choice is made.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/tensor_split_native.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch/boxed_borrow.h"
#include "torch/typed_borrow.h"

namespace mybackend::glue {
namespace {

// --- Recurrent networks ---------------------------------------------------------------------
// lstm, gru and rnn are composites that choose a fused CUDA path for PrivateUse1 and oneDNN's for
// the CPU. Where the CPU lends, the whole composite runs on CPU tensors over our bytes, with a CPU
// autograd graph of its own; one node in the outer graph stands for it.

struct CpuGraphBackward final : torch::autograd::Node {
  std::string operator_name;
  c10::DeviceIndex device = -1;
  std::vector<at::Tensor> cpu_inputs;   // leaves of the CPU graph
  std::vector<at::Tensor> cpu_outputs;  // its roots; undefined when not differentiable

  std::string name() const override { return "MyBackendCpuGraph<" + operator_name + ">"; }

  void release_variables() override {
    cpu_inputs.clear();
    cpu_outputs.clear();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    TORCH_CHECK(!cpu_inputs.empty(), torch::autograd::ERR_BACKWARD_TWICE);
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), operator_name, ": double backward is not supported on mybackend");
    const bool keep_graph = torch::autograd::get_current_graph_task_keep_graph();
    torch::autograd::variable_list roots, root_gradients;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined() || !cpu_outputs[i].defined()) continue;
      roots.push_back(cpu_outputs[i]);
      root_gradients.push_back(share_as_lender(gradients[i]));
    }
    torch::autograd::variable_list results(cpu_inputs.size());
    if (roots.empty()) return results;
    wait_for_current_stream(device);
    BorrowScope scope(device);
    at::AutoGradMode grad_mode(true);
    torch::autograd::variable_list wanted;
    for (const at::Tensor& input : cpu_inputs) {
      if (input.requires_grad()) wanted.push_back(input);
    }
    torch::autograd::variable_list found =
        torch::autograd::grad(roots, wanted, root_gradients, keep_graph, /*create_graph=*/false, /*allow_unused=*/true);
    std::size_t next = 0;
    for (std::size_t i = 0; i < cpu_inputs.size(); ++i) {
      if (!cpu_inputs[i].requires_grad()) continue;
      at::Tensor& gradient = found[next++];
      if (gradient.defined()) results[i] = share_as_device(gradient.detach(), device);
    }
    return results;
  }
};

// Every tensor in the arguments, lists included, in order.
template <class Visit>
void for_each_tensor(c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = visit(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? visit(tensor) : tensor);
    value = std::move(list);
  }
}

void run_with_cpu_graph(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  memory();  // starts the devices, and with them the lender
  if (on_gpu()) {
    // The fused CUDA path is right there. (A graph of CUDA's own could not be: autograd's engine looks
    // for the streams of one accelerator only.) The composite, which is every backend's autograd kernel.
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), stack);
    return;
  }
  const std::string name = op.schema().name();
  const std::size_t argument_count = op.schema().arguments().size();
  const std::size_t first = stack->size() - argument_count;
  BorrowFrame devices(name.c_str());  // only for its checks; it is never opened
  torch::autograd::variable_list inputs;
  for (std::size_t i = first; i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
      devices.see(tensor, false, /*cpu_allowed=*/!at::isFloatingType(tensor.scalar_type()));  // batch sizes live on the CPU
      if (tensor.device().type() == kDeviceType) inputs.push_back(tensor);
      return tensor;
    });
  }
  devices.check_devices();
  const c10::DeviceIndex device = devices.device();
  const bool differentiable = at::GradMode::is_enabled() && torch::autograd::compute_requires_grad(inputs);
  c10::intrusive_ptr<CpuGraphBackward> node;
  if (differentiable) {
    node = c10::make_intrusive<CpuGraphBackward>();
    node->operator_name = name;
    node->device = device;
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  }
  for (std::size_t i = first; i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
      if (tensor.device().type() != kDeviceType) return tensor;
      at::Tensor cpu = share_as_lender(tensor);
      // Also where no graph is made: some paths of the CPU look at it.
      if (tensor.requires_grad()) cpu.set_requires_grad(true);
      if (differentiable) node->cpu_inputs.push_back(cpu);
      return cpu;
    });
  }
  wait_for_current_stream(device);
  {
    BorrowScope scope(device);
    at::AutoGradMode grad_mode(differentiable);
    c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastPrivateUse1}));
    ScopedDefaultGenerator generator(device);  // dropout between the layers
    op.callBoxed(stack);
  }
  const std::size_t result_count = op.schema().returns().size();
  for (std::size_t i = stack->size() - result_count; i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [&](const at::Tensor& cpu) {
      at::Tensor result = share_as_device(cpu, device);
      if (node != nullptr) {
        if (cpu.requires_grad())
          torch::autograd::set_history(result, node);
        else
          node->add_input_metadata(torch::autograd::Node::undefined_input());
        node->cpu_outputs.push_back(cpu.requires_grad() ? cpu : at::Tensor());
      }
      return result;
    });
  }
}

constexpr const char* kRecurrent[] = {"lstm.input",     "lstm.data",     "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data",
                                      "rnn_relu.input", "rnn_relu.data", "lstm_cell", "gru_cell", "rnn_tanh_cell",  "rnn_relu_cell"};

// --- Convolution ------------------------------------------------------------------------------

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward_overrideable(const at::Tensor& grad, const at::Tensor& input,
                                                                                 const at::Tensor& weight, c10::SymIntArrayRef stride,
                                                                                 c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                                                                                 bool transposed, c10::SymIntArrayRef output_padding,
                                                                                 c10::SymInt groups, std::array<bool, 3> mask) {
  const c10::SymInt channels = grad.sym_size(1);
  return at::_ops::convolution_backward::call(grad, input, weight, at::OptionalSymIntArrayRef(channels), stride, padding, dilation,
                                              transposed, output_padding, std::move(groups), mask);
}

// --- Dropout ----------------------------------------------------------------------------------
// ATen takes native_dropout for PrivateUse1 and CUDA, the composition below for the CPU; they round
// differently.

at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.sym_numel() == 0) return input;
  if (on_gpu() && p < 1) return std::get<0>(at::native_dropout(input, p, train));
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  at::Tensor noise = at::empty_like(input);
  noise.bernoulli_(1 - p);
  noise.div_(1 - p);
  return input.mul(noise);
}

// --- Attention --------------------------------------------------------------------------------

std::int64_t fused_sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal, std::optional<double> scale,
                              bool enable_gqa) {
  // vmap and its like wrap tensors: the choice is made for what the wrappers show, as on the CPU.
  const c10::impl::ExcludeDispatchKeyGuard no_transforms(
      c10::DispatchKeySet{c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                          c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  const auto as_lent = [](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kDeviceType) return tensor;
    at::Tensor lent = tensor.has_storage() ? share_as_lender(tensor)
                                           : at::empty_strided(tensor.sizes(), tensor.strides(),
                                                               tensor.options().device(lender_device(tensor.device().index())));
    if (tensor.requires_grad() && at::GradMode::is_enabled()) lent.set_requires_grad(true);
    return lent;
  };
  const std::optional<at::Tensor> lent_mask = mask.has_value() ? std::optional<at::Tensor>(as_lent(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(as_lent(query), as_lent(key), as_lent(value), lent_mask, dropout_p, is_causal, scale, enable_gqa);
}

// --- tensor_split -----------------------------------------------------------------------------
// Core insists on indices on the CPU and says so even where the caller cannot know; they are
// read there anyway.

std::vector<at::Tensor> tensor_split(const at::Tensor& self, const at::Tensor& indices_or_sections, std::int64_t dim) {
  return at::native::tensor_split(self, indices_or_sections.cpu(), dim);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("tensor_split.tensor_indices_or_sections", TORCH_FN(tensor_split));
  for (const char* name : kRecurrent) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_cpu_graph>());
  m.impl("dropout", TORCH_FN(dropout));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("tensor_split.tensor_indices_or_sections", TORCH_FN(tensor_split));
  for (const char* name : kRecurrent) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_cpu_graph>());
  m.impl("dropout", TORCH_FN(dropout));
  m.impl("convolution_overrideable", TORCH_FN((&Typed<at::_ops::convolution>::call)));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward_overrideable));
}

void drain_autograd_threads() noexcept {
  DeviceMemory* const memory = Runtime::get().memory_if_started();
  if (memory == nullptr || Runtime::get().is_in_bad_fork()) return;
  // A stack of Python needs the interpreter, and these threads may free memory when it is going.
  memory->stop_capturing();
  c10::AutogradState::get_tls_state().set_multithreading_enabled(true);  // (see run_backward_here)
  for (int device = 0; device < memory->device_count(); ++device) {
    // A GPU that was never used would get a context for this.
    if (on_gpu() && memory->caching(device).stats().num_device_alloc == 0) continue;
    try {
      const at::Tensor leaf =
          at::zeros({1}, at::TensorOptions().device(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)))).requires_grad_();
      torch::autograd::grad({leaf.sum()}, {leaf});
    } catch (...) {  // a forked child, a broken device: there is nothing to wait for
    }
  }
}

}  // namespace mybackend::glue

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &mybackend::glue::fused_sdp_choice)
}  // namespace at::native
