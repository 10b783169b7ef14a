#include "torch/borrow.h"

#include <c10/core/impl/InlineDeviceGuard.h>

#include "base/thread_local.h"
#include "torch/device_allocator.h"
#include "torch/profiler.h"
#include "torch/tensor_access.h"

namespace mybackend::glue {
namespace {

std::atomic<std::int64_t> g_copied_outputs{0};

const c10::Device kCpu(c10::DeviceType::CPU);

// What the layout does not tell.
constexpr c10::DispatchKeySet kRefusedKinds({c10::DispatchKey::Quantized, c10::DispatchKey::NestedTensor});

// Autograd and autocast have had their turn when a backend kernel runs; the borrowed kernel's
// own calls must not meet them again.
const c10::DispatchKeySet& excluded_keys() {
  static const c10::DispatchKeySet keys = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                          c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
  return keys;
}

// A tensor of the lender with a storage of its own, both of which only this thread's stack refers to while
// no frame uses it.
struct Shell {
  at::Tensor tensor;
  c10::Storage storage;

  Shell()
      : tensor(c10::make_intrusive<c10::TensorImpl>(lender_keys(), caffe2::TypeMeta::Make<float>(), lender_device(0))),
        storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, lender_device(0)),
                                                      lender_allocator(), /*resizable=*/true)) {
    TensorAccess::storage(tensor.unsafeGetTensorImpl()) = storage;
  }
};

// The shells of a thread, used as a stack: those below `top` belong to open frames. Their places
// do not move.
struct ShellStack {
  std::vector<std::unique_ptr<Shell>> shells;
  std::size_t top = 0;

  Shell& push() {
    if (C10_UNLIKELY(top == shells.size())) shells.push_back(std::make_unique<Shell>());
    return *shells[top++];
  }
};

MYBACKEND_HOT_THREAD_LOCAL ShellStack* t_stack = nullptr;

// The kernels run on the CPU, so a backward runs best on the thread that asks for it, as a CPU tensor's
// does. On autograd's thread for the device it would have an OpenMP team of its own; with two teams
// there are more threads than cores, and libgomp's sleep between parallel regions: small models then
// take up to twice as long. Once per thread: a program may switch it back on.
MYBACKEND_HOT_THREAD_LOCAL bool t_backward_is_here = false;

void run_backward_here() {
  if (c10::InferenceMode::is_enabled()) return;  // its end restores what was before
  t_backward_is_here = true;
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

ShellStack& shell_stack() {
  // Reached through a plain pointer: this is on the way of every operator.
  if (C10_LIKELY(t_stack != nullptr)) return *t_stack;
  struct Owner {
    ShellStack stack;
    ~Owner() { t_stack = nullptr; }
  };
  thread_local Owner owner;
  t_stack = &owner.stack;
  return owner.stack;
}

void release_storage_reference(void* context) {
  delete static_cast<c10::Storage*>(context);
}

c10::DataPtr shared_data_ptr(const c10::Storage& storage, c10::Device device) {
  void* data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  return {data, new c10::Storage(storage), &release_storage_reference, device};
}

// Gives a lazily cloned storage bytes of its own, on its device.
void materialize(c10::StorageImpl* storage) {
  const DeviceScope scope(storage->device());
  storage->mutable_data();
}

at::Tensor share(const at::Tensor& tensor, c10::Device device, c10::Allocator* allocator) {
  const c10::TensorImpl* from = tensor.unsafeGetTensorImpl();
  const bool to_lender = device.type() != kDeviceType;
  // An inference tensor shares as one, a normal tensor as a normal one, whatever the mode is now.
  c10::InferenceMode mode(tensor.is_inference());
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet(to_lender ? lender_key() : c10::DispatchKey::PrivateUse1),
                                                   from->dtype(), device);
  TensorAccess::copy_geometry(from, impl.get());
  TensorAccess::device(impl.get()) = device;
  // One counter for both: autograd notices a change of the one that the other was saved for.
  if (!tensor.is_inference()) impl->set_version_counter(from->version_counter());
  TensorAccess::keys(impl.get()) = to_lender ? to_lender_keys(tensor.key_set()) : to_device_keys(tensor.key_set());
  if (from->has_storage() && from->unsafe_storage()) {
    const c10::Storage& storage = from->unsafe_storage();
    if (C10_UNLIKELY(storage.unsafeGetStorageImpl()->has_materializer())) materialize(storage.unsafeGetStorageImpl());
    TensorAccess::storage(impl.get()) = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage.sym_nbytes(), shared_data_ptr(storage, device), allocator, /*resizable=*/true));
  }
  return at::Tensor(std::move(impl));
}

}  // namespace

std::int64_t copied_output_count() noexcept {
  return g_copied_outputs.load(std::memory_order_relaxed);
}

at::Tensor share_as_device(const at::Tensor& lent, c10::DeviceIndex device) {
  return share(lent, c10::Device(kDeviceType, device), device_allocator());
}

at::Tensor share_as_lender(const at::Tensor& device_tensor) {
  return share(device_tensor, lender_device(device_tensor.device().index()), lender_allocator());
}

// Bytes that are about to go, from another allocator.
static void copy_foreign_bytes(c10::DeviceIndex device, void* to, const void* from, std::size_t bytes) {
  copy_device_bytes(device, to, from, bytes);
  if (on_gpu()) check(memory().driver().stream_synchronize(device, current_stream(device)));
}

// --- Arguments ------------------------------------------------------------------------------

void BorrowFrame::different_devices(c10::Device other) const {
  const c10::Device first = device_ >= 0 ? c10::Device(kDeviceType, device_) : kCpu;
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", first, " and ", other,
              "! (when checking arguments of ", operator_name_, ")");
}

void BorrowFrame::see_other(const at::Tensor& tensor, bool is_written, bool cpu_allowed) {
  const c10::Device device = tensor.device();
  if (device.is_cpu()) {
    if (cpu_allowed) return;
    if (tensor.dim() == 0 && !is_written) return;
    cpu_with_dimensions_ = true;  // an error once a device tensor is seen too
    return;
  }
  different_devices(device);
}

void BorrowFrame::open() {
  check_devices();
  if (device_ < 0) device_ = current_device();
  Driver& driver = memory().driver();  // starts the devices, and with them the lender
  if (on_gpu()) {
    lender_ = lender_device(device_);
  } else {
    if (C10_UNLIKELY(!t_backward_is_here)) run_backward_here();
    if (C10_UNLIKELY(driver.maybe_busy(device_))) check(driver.stream_synchronize(device_, current_stream(device_)));
  }
  pool_base_ = shell_stack().top;
  new (scope_) LendingScope(device_);
  new (guard_) c10::impl::ExcludeDispatchKeyGuard(excluded_keys());
  opened_ = true;
  if (is_profiling() && !on_gpu()) profiled_from_ns_ = profiler_now();
}

const at::Tensor& BorrowFrame::alias(const at::Tensor& tensor, bool is_written, bool may_change) {
  if (C10_UNLIKELY(!tensor.defined())) return tensor;
  if (C10_UNLIKELY(tensor.device().type() != kDeviceType)) {
    cpu_arguments_.push_back(tensor.unsafeGetTensorImpl());
    return tensor;
  }
  const c10::TensorImpl* base = tensor.unsafeGetTensorImpl();
  TORCH_CHECK_NOT_IMPLEMENTED(base->layout() == c10::kStrided, operator_name_, ": mybackend does not support the layout ", base->layout());
  c10::StorageImpl* base_storage = base->has_storage() ? base->unsafe_storage().unsafeGetStorageImpl() : nullptr;

  // Overlap checks compare tensors and storages: one tensor, one alias; one base storage, one below the aliases.
  Alias* same = base_storage != nullptr ? find(base_storage) : nullptr;
  if (C10_UNLIKELY(same != nullptr)) {
    // A lazy clone's storage, which an earlier argument only reads, gets bytes of its own when this one writes.
    if (C10_UNLIKELY(base_storage->has_materializer() && (is_written || may_change))) set_data(*same, base_storage);
    if (Alias* again = find_base(base)) {
      again->is_written |= is_written;
      return shell_stack().shells[pool_base_ + static_cast<std::size_t>(again - aliases_.data())]->tensor;
    }
  }
  Shell& shell = shell_stack().push();
  c10::TensorImpl* impl = shell.tensor.unsafeGetTensorImpl();
  Alias entry{impl, nullptr, &tensor, base_storage, nullptr, 0, is_written};
  TensorAccess::copy_geometry(base, impl);
  TensorAccess::keys(impl) = to_lender_keys(base->key_set());
  TensorAccess::device(impl) = lender_;

  if (C10_UNLIKELY(base_storage == nullptr)) {
    TensorAccess::storage(impl) = c10::Storage();
  } else if (C10_UNLIKELY(same != nullptr)) {
    TensorAccess::storage(impl) = TensorAccess::storage(same->shell);
  } else {
    entry.shell_storage = shell.storage.unsafeGetStorageImpl();
    if (C10_UNLIKELY(base_storage->has_materializer() && (is_written || may_change))) materialize(base_storage);
    entry.data = base_storage->_mutable_data_ptr_no_checks().get();
    entry.nbytes = base_storage->nbytes();
    entry.shell_storage->_mutable_data_ptr_no_checks() = c10::DataPtr(entry.data, lender_);
    entry.shell_storage->unsafe_set_nbytes(entry.nbytes);
    entry.shell_storage->set_resizable(base_storage->resizable());
  }
  aliases_.push_back(entry);
  if (C10_UNLIKELY(aliases_.size() > kScanned)) index(aliases_.size() - 1);
  return shell.tensor;
}

void BorrowFrame::set_data(Alias& alias, c10::StorageImpl* base_storage) {
  materialize(base_storage);
  alias.data = base_storage->_mutable_data_ptr_no_checks().get();
  alias.shell_storage->_mutable_data_ptr_no_checks() = c10::DataPtr(alias.data, lender_);
}

BorrowFrame::Alias* BorrowFrame::find(const void* key) noexcept {
  if (C10_UNLIKELY(positions_ != nullptr)) {
    auto found = positions_->find(key);
    return found != positions_->end() ? &aliases_[found->second] : nullptr;
  }
  for (Alias& entry : aliases_) {
    if (entry.base_storage == key || entry.shell == key || entry.shell_storage == key) return &entry;
  }
  return nullptr;
}

BorrowFrame::Alias* BorrowFrame::find_base(const c10::TensorImpl* base) noexcept {
  if (positions_ != nullptr) return find(base);
  for (Alias& entry : aliases_) {
    if (entry.base->unsafeGetTensorImpl() == base) return &entry;
  }
  return nullptr;
}

void BorrowFrame::index(std::size_t position) {
  std::size_t first = position;
  if (positions_ == nullptr) {
    positions_ = std::make_unique<std::unordered_map<const void*, std::size_t>>();
    first = 0;
  }
  for (std::size_t i = first; i <= position; ++i) {
    for (const void* key :
         {static_cast<const void*>(aliases_[i].base_storage), static_cast<const void*>(aliases_[i].shell),
          static_cast<const void*>(aliases_[i].shell_storage), static_cast<const void*>(aliases_[i].base->unsafeGetTensorImpl())}) {
      if (key != nullptr) positions_->try_emplace(key, i);
    }
  }
}

const at::Tensor* BorrowFrame::argument_of(const at::Tensor& alias) noexcept {
  const Alias* entry = find(alias.unsafeGetTensorImpl());
  return entry != nullptr ? entry->base : nullptr;
}

// --- The way back ---------------------------------------------------------------------------

void BorrowFrame::write_back_storage(Alias& alias) {
  c10::StorageImpl* shell = alias.shell_storage;
  c10::DataPtr& data = shell->_mutable_data_ptr_no_checks();
  if (data.get() == alias.data && shell->nbytes() == alias.nbytes) return;
  // The kernel resized it. Its new bytes came from the borrowing allocator.
  const c10::Device device(kDeviceType, device_);
  const std::size_t nbytes = shell->nbytes();
  c10::DataPtr adopted = std::move(data);
  if (adopted.get() != nullptr && !take_over(adopted)) {
    c10::DataPtr copy = allocate_device_bytes(device_, nbytes, device);
    copy_foreign_bytes(device_, copy.get(), adopted.get(), nbytes);
    g_copied_outputs.fetch_add(1, std::memory_order_relaxed);
    adopted = std::move(copy);
  }
  adopted.unsafe_set_device(device);
  alias.base_storage->set_data_ptr_noswap(std::move(adopted));
  alias.base_storage->set_nbytes(nbytes);
  alias.data = alias.base_storage->_mutable_data_ptr_no_checks().get();
  alias.nbytes = nbytes;
  data = c10::DataPtr(alias.data, lender_);
}

void BorrowFrame::write_back() {
  for (Alias& alias : aliases_) {
    if (alias.shell_storage != nullptr) write_back_storage(alias);
    if (!alias.is_written) continue;
    c10::TensorImpl* base = alias.base->unsafeGetTensorImpl();
    const c10::TensorImpl* shell = alias.shell;
    if (C10_UNLIKELY(shell->sizes() != base->sizes() || shell->strides() != base->strides() ||
                     shell->storage_offset() != base->storage_offset())) {
      base->set_sizes_and_strides(shell->sizes(), shell->strides(), shell->storage_offset());
    }
    // lu_solve, for one, leaves an out= that is to be read conjugated.
    if (C10_UNLIKELY(shell->is_conj() != base->is_conj())) base->_set_conj(shell->is_conj());
    if (C10_UNLIKELY(shell->is_neg() != base->is_neg())) base->_set_neg(shell->is_neg());
  }
}

// A storage that the kernel made becomes a device storage in place.
void BorrowFrame::adopt_storage(c10::TensorImpl* result) {
  c10::Storage& storage = TensorAccess::storage(result);
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  if (impl == nullptr) return;
  const c10::Device device(kDeviceType, device_);
  c10::DataPtr& data = impl->_mutable_data_ptr_no_checks();
  if (data.device().type() == kDeviceType) return;  // another result shares it
  if (C10_LIKELY(take_over(data)) || data.get() == nullptr) {
    // (Zero tensors have a size and no bytes at all.)
    data.unsafe_set_device(device);
    impl->set_allocator(device_allocator());
    return;
  }
  // Bytes from elsewhere: another thread's allocation, a constant, a foreign buffer.
  const std::size_t nbytes = impl->nbytes();
  c10::DataPtr copy = allocate_device_bytes(device_, nbytes, device);
  if (nbytes != 0) {
    copy_foreign_bytes(device_, copy.get(), data.get(), nbytes);
    g_copied_outputs.fetch_add(1, std::memory_order_relaxed);
  }
  storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes, std::move(copy),
                                                               device_allocator(), /*resizable=*/true));
}

at::Tensor BorrowFrame::adopt(at::Tensor&& result) {
  if (!result.defined() || result.device().type() != lender_.type()) return std::move(result);
  c10::TensorImpl* impl = result.unsafeGetTensorImpl();
  if (const at::Tensor* argument = argument_of(result)) return *argument;
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == c10::kStrided, operator_name_, ": mybackend does not support results of layout ",
                              result.layout());
  if (C10_UNLIKELY((impl->key_set() & kRefusedKinds) != c10::DispatchKeySet())) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, operator_name_, ": mybackend does not support ", result.is_quantized() ? "quantized" : "nested",
                                " tensors");
  }
  c10::StorageImpl* storage = impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
  const Alias* viewed = storage != nullptr ? find(storage) : nullptr;
  if (viewed == nullptr) {
    // A CPU argument that the kernel returned as it is stays what it is.
    for (const c10::TensorImpl* argument : cpu_arguments_) {
      if (argument == impl) return std::move(result);
    }
    adopt_storage(impl);
  } else {
    TensorAccess::storage(impl) = viewed->base->unsafeGetTensorImpl()->unsafe_storage();
  }
  TensorAccess::keys(impl) = to_device_keys(impl->key_set());
  TensorAccess::device(impl) = c10::Device(kDeviceType, device_);
  return std::move(result);
}

BorrowFrame::~BorrowFrame() {
  if (!opened_) return;
  if (C10_UNLIKELY(profiled_from_ns_ != 0)) {
    record_kernel(operator_name_, KernelKind::kKernel, device_, current_stream(device_), profiled_from_ns_, profiler_now(),
                  profiler_correlation());
  }
  reinterpret_cast<c10::impl::ExcludeDispatchKeyGuard*>(guard_)->~ExcludeDispatchKeyGuard();
  reinterpret_cast<LendingScope*>(scope_)->~LendingScope();
  ShellStack& stack = shell_stack();
  // First give every shell its own storage back, so that the counts tell escapes.
  for (std::size_t i = 0; i < aliases_.size(); ++i) {
    if (C10_LIKELY(aliases_[i].shell_storage != nullptr)) continue;
    Shell& shell = *stack.shells[pool_base_ + i];
    if (shell.tensor.use_count() == 1) TensorAccess::storage(shell.tensor.unsafeGetTensorImpl()) = shell.storage;
  }
  for (std::size_t i = 0; i < aliases_.size(); ++i) {
    Shell& shell = *stack.shells[pool_base_ + i];
    const bool kept = shell.tensor.use_count() != 1 || shell.storage.use_count() != 2;
    if (C10_LIKELY(!kept)) {
      if (aliases_[i].shell_storage != nullptr) {
        shell.storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks() = c10::DataPtr(nullptr, lender_);
      }
      continue;
    }
    // Someone keeps the alias or a view of it: it owns a reference to the base's storage now.
    if (aliases_[i].shell_storage != nullptr) {
      aliases_[i].shell_storage->_mutable_data_ptr_no_checks() = shared_data_ptr(aliases_[i].base->storage(), lender_);
    }
    *stack.shells[pool_base_ + i] = Shell();
  }
  stack.top = pool_base_;
}

}  // namespace mybackend::glue
