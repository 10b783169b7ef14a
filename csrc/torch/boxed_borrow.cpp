#include "torch/boxed_borrow.h"

#include <torch/library.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include "torch/borrow.h"
#include "torch/generator.h"

namespace mybackend::glue {
namespace {

// Operators that take CPU tensors with dimensions beside device tensors, as on CUDA.
bool accepts_cpu_tensors(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index",
      "aten::index_put",
      "aten::index_put_",
      "aten::_index_put_impl_",
      "aten::_index_put_impl",
      "aten::_unsafe_index",
      "aten::_unsafe_index_put",
      "aten::_unsafe_masked_index",
      "aten::_unsafe_masked_index_put_accumulate",
      "aten::_pad_packed_sequence",
      "aten::_pack_padded_sequence",
      "aten::_copy_from",
      "aten::_copy_from_and_resize",
  };
  return names.count(name) != 0;
}

enum class ArgumentKind : unsigned char { kOther, kTensor, kTensorList, kOptionalTensorList, kDevice, kGenerator };

struct ArgumentPlan {
  ArgumentKind kind = ArgumentKind::kOther;
  bool is_written = false;
  bool may_change = false;  // optional tensors: batch norm changes its statistics, and its schema does not say so
};

// What the schema of an operator says, worked out once.
struct Plan {
  std::string name;
  std::vector<ArgumentPlan> arguments;
  std::size_t return_count = 0;
  bool returns_tensors = false;
  bool cpu_allowed = false;
  bool needs_default_generator = false;  // random, without a generator argument
};

ArgumentKind kind_of(const c10::Argument& argument) {
  const c10::TypePtr& real = argument.type();
  c10::TypePtr type = real;
  if (auto optional = real->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return ArgumentKind::kTensor;
    case c10::TypeKind::DeviceObjType: return ArgumentKind::kDevice;
    case c10::TypeKind::GeneratorType: return ArgumentKind::kGenerator;
    case c10::TypeKind::ListType: {
      const c10::TypePtr element = type->expectRef<c10::ListType>().getElementType();
      if (element->kind() == c10::TypeKind::TensorType) return ArgumentKind::kTensorList;
      if (element->kind() == c10::TypeKind::OptionalType) {
        if (element->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::TensorType)
          return ArgumentKind::kOptionalTensorList;
      }
      return ArgumentKind::kOther;
    }
    default: return ArgumentKind::kOther;
  }
}

Plan make_plan(const c10::OperatorHandle& op) {
  Plan plan;
  const c10::FunctionSchema& schema = op.schema();
  plan.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  plan.cpu_allowed = accepts_cpu_tensors(schema.name());
  bool has_generator = false;
  for (const c10::Argument& argument : schema.arguments()) {
    ArgumentPlan a;
    a.kind = kind_of(argument);
    a.is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    a.may_change = argument.type()->kind() == c10::TypeKind::OptionalType;
    has_generator = has_generator || a.kind == ArgumentKind::kGenerator;
    plan.arguments.push_back(a);
  }
  plan.return_count = schema.returns().size();
  plan.needs_default_generator = !has_generator && op.hasTag(at::Tag::nondeterministic_seeded);
  return plan;
}

const Plan& plan_of(const c10::OperatorHandle& op) {
  static auto* plans = new std::unordered_map<const void*, std::unique_ptr<Plan>>;
  static auto* mutex = new std::shared_mutex;
  const void* key = &op.schema();  // lives as long as the operator
  // The last operators of this thread, directly mapped.
  struct Recent {
    const void* key = nullptr;
    const Plan* plan = nullptr;
  };
  static thread_local std::unique_ptr<Recent[]> recent;  // on the heap: see base/thread_local.h
  if (C10_UNLIKELY(recent == nullptr)) recent = std::make_unique<Recent[]>(64);
  Recent& slot = recent[(reinterpret_cast<std::uintptr_t>(key) >> 6) % 64];
  if (slot.key == key) return *slot.plan;
  {
    std::shared_lock lock(*mutex);
    auto found = plans->find(key);
    if (found != plans->end()) {
      slot = {key, found->second.get()};
      return *found->second;
    }
  }
  auto plan = std::make_unique<Plan>(make_plan(op));
  std::unique_lock lock(*mutex);
  auto [place, added] = plans->try_emplace(key, std::move(plan));
  slot = {key, place->second.get()};
  return *place->second;
}

[[noreturn]] void no_kernel(const Plan& plan, const std::string& why) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "The operator '", plan.name, "' cannot run on mybackend: ", why);
}

void see_arguments(const Plan& plan, c10::ArrayRef<c10::IValue> arguments, BorrowFrame& frame) {
  for (std::size_t i = 0; i < plan.arguments.size(); ++i) {
    const ArgumentPlan& a = plan.arguments[i];
    const c10::IValue& value = arguments[i];
    if (a.kind == ArgumentKind::kOther || value.isNone()) continue;
    switch (a.kind) {
      case ArgumentKind::kTensor: frame.see(value.toTensor(), a.is_written, plan.cpu_allowed); break;
      case ArgumentKind::kTensorList:
        for (const at::Tensor& tensor : value.toTensorVector()) frame.see(tensor, a.is_written, plan.cpu_allowed);
        break;
      case ArgumentKind::kOptionalTensorList:
        for (const c10::IValue& element : value.toListRef()) {
          if (!element.isNone()) frame.see(element.toTensor(), a.is_written, plan.cpu_allowed);
        }
        break;
      default: break;
    }
  }
  if (frame.device() >= 0) return;
  for (std::size_t i = 0; i < plan.arguments.size(); ++i) {  // a factory, or tensors on the CPU
    const c10::IValue& value = arguments[i];
    if (value.isNone()) continue;
    if (plan.arguments[i].kind == ArgumentKind::kDevice && value.toDevice().type() == kDeviceType) {
      frame.see_device(resolve_device(value.toDevice()));
    } else if (plan.arguments[i].kind == ArgumentKind::kGenerator && value.toGenerator().device().type() == kDeviceType) {
      frame.see_device(value.toGenerator().device().index());
    }
  }
}

// The arguments' tensors, which the frame refers to while their places on the stack hold aliases.
// Reserved before it is filled: its elements must not move.
using Owned = c10::SmallVector<at::Tensor, 8>;

void alias_arguments(const Plan& plan, torch::jit::Stack* stack, std::size_t first, BorrowFrame& frame, Owned& owned) {
  std::size_t tensor_count = 0;
  for (std::size_t i = 0; i < plan.arguments.size(); ++i) {
    const c10::IValue& value = (*stack)[first + i];
    tensor_count += value.isTensor() ? 1 : value.isList() ? value.toListRef().size() : 0;
  }
  owned.reserve(tensor_count);
  auto alias = [&](at::Tensor&& tensor, const ArgumentPlan& a) -> const at::Tensor& {
    owned.push_back(std::move(tensor));
    return frame.alias(owned.back(), a.is_written, a.may_change);
  };
  for (std::size_t i = 0; i < plan.arguments.size(); ++i) {
    const ArgumentPlan& a = plan.arguments[i];
    if (a.kind == ArgumentKind::kOther) continue;
    c10::IValue& value = (*stack)[first + i];
    if (a.kind == ArgumentKind::kGenerator) {
      const std::optional<at::Generator> given = value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator());
      value = c10::IValue(borrowed_generator(given, frame.device()));
      continue;
    }
    if (value.isNone()) continue;
    switch (a.kind) {
      case ArgumentKind::kTensor: value = alias(std::move(value).toTensor(), a); break;
      case ArgumentKind::kTensorList: {
        c10::List<at::Tensor> list;
        std::vector<at::Tensor> tensors = value.toTensorVector();
        list.reserve(tensors.size());
        for (at::Tensor& tensor : tensors) list.push_back(alias(std::move(tensor), a));
        value = std::move(list);
        break;
      }
      case ArgumentKind::kOptionalTensorList: {
        c10::List<std::optional<at::Tensor>> list;
        for (const c10::IValue& element : value.toListRef()) {
          list.push_back(element.isNone() ? std::nullopt : std::optional<at::Tensor>(alias(at::Tensor(element.toTensor()), a)));
        }
        value = std::move(list);
        break;
      }
      case ArgumentKind::kDevice:
        if (value.toDevice().type() == kDeviceType) value = lender_device(frame.device());
        break;
      default: break;
    }
  }
}

void adopt_results(const Plan& plan, torch::jit::Stack* stack, BorrowFrame& frame) {
  const std::size_t first = stack->size() - plan.return_count;
  for (std::size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = frame.adopt(std::move(value).toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list = std::move(value).toTensorList();
      for (std::size_t j = 0; j < list.size(); ++j) list.set(j, frame.adopt(list.extract(j)));
      value = std::move(list);
    }
  }
}

}  // namespace

void borrow_boxed(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const Plan& plan = plan_of(op);
  const std::size_t first = stack->size() - plan.arguments.size();
  Owned owned;  // outlives the frame
  BorrowFrame frame(plan.name.c_str());
  see_arguments(plan, c10::ArrayRef<c10::IValue>(*stack).slice(first), frame);
  frame.open();
  if (C10_UNLIKELY(!op.hasComputedKernelForDispatchKey(lender_key()))) {
    no_kernel(plan, std::string("there is no ") + (on_gpu() ? "CUDA" : "CPU") + " kernel to borrow for it");
  }
  alias_arguments(plan, stack, first, frame, owned);
  if (C10_UNLIKELY(plan.needs_default_generator)) {
    ScopedDefaultGenerator scope(frame.device());
    op.redispatchBoxed(lender_keys(), stack);
  } else {
    op.redispatchBoxed(lender_keys(), stack);
  }
  frame.write_back();
  adopt_results(plan, stack, frame);
}

namespace {

// Composites that call the CPU's kernels past the dispatcher.
constexpr std::string_view kNativeComposites[] = {"aten::conj_physical_"};

bool is_native_composite(const std::string& name) {
  return std::find(std::begin(kNativeComposites), std::end(kNativeComposites), name) != std::end(kNativeComposites);
}

}  // namespace

void register_boxed_kernels() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0) continue;
      const auto op = dispatcher.findSchema(name);
      if (!op.has_value() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
      if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && !is_native_composite(name.name)) continue;
      const bool has_composite = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
                                 op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                                 op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
      if (!has_composite) continue;
      const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&borrow_boxed>());
    }
  });
}

namespace {

template <const char* const& kWhat>
void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  no_kernel(plan_of(op), std::string(kWhat) + " are not supported");
}

const char* const kSparse = "sparse tensors";
const char* const kNested = "nested tensors";
const char* const kQuantized = "quantized tensors";

}  // namespace

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<kSparse>>());
}
// Composites, which go before a fallback.
TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  for (const char* name :
       {"sparse_compressed_tensor.comp_plain_value_size", "_sparse_compressed_tensor_unsafe", "_sparse_csr_tensor_unsafe",
        "_sparse_csc_tensor_unsafe", "_sparse_bsr_tensor_unsafe", "_sparse_bsc_tensor_unsafe"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse<kSparse>>());
  }
}
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<kSparse>>());
}
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<kNested>>());
}
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<kQuantized>>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&borrow_boxed>());
}

}  // namespace mybackend::glue
