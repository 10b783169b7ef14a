// Operators about storage and shape: they make, resize and rearrange tensors and compute nothing.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "torch/context.h"
#include "torch/device_allocator.h"
#include "torch/lender.h"
#include "torch/storage_ops.h"

namespace mybackend::glue {

void resize_storage_bytes(c10::StorageImpl* storage, std::size_t nbytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  const c10::Device device = storage->device();
  wait_for_current_stream(device.index());
  c10::DataPtr bytes = allocate_device_bytes(device.index(), nbytes, device);
  const std::size_t kept = std::min(nbytes, storage->nbytes());
  copy_device_bytes(device.index(), bytes.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(bytes));
  storage->set_nbytes(nbytes);
}

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_of(std::optional<c10::Device> device) {
  return c10::Device(kDeviceType, device.has_value() ? resolve_device(*device) : current_device());
}

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout.has_value() || *layout == c10::kStrided, "mybackend does not support the layout ", *layout);
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

// torch.use_deterministic_algorithms: what was never written is NaN, or the largest integer.
bool fills_uninitialized_memory() {
  return at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory();
}

at::Tensor filled(at::Tensor tensor) {
  if (C10_UNLIKELY(fills_uninitialized_memory())) at::native::fill_empty_deterministic_(tensor);
  return tensor;
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
                               std::optional<c10::Device> device, std::optional<bool> pin_memory,
                               std::optional<c10::MemoryFormat> memory_format) {
  check_options(layout, pin_memory);
  DeviceScope scope(device_of(device));
  return filled(at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), memory_format));
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  DeviceScope scope(device_of(device));
  return filled(at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype)));
}

void resize_tensor(c10::TensorImpl* impl, c10::IntArrayRef size, at::OptionalIntArrayRef stride) {
  if (impl->sizes() == size && (!stride || impl->strides() == *stride)) return;
  const std::size_t itemsize = impl->dtype().itemsize();
  std::size_t wanted = 0;
  if (stride) {
    impl->set_sizes_and_strides(size, *stride);
    wanted = at::detail::computeStorageNbytes(size, *stride, itemsize, static_cast<std::size_t>(impl->storage_offset()));
  } else {
    impl->set_sizes_contiguous(size);
    wanted = at::detail::computeStorageNbytesContiguous(size, itemsize, static_cast<std::size_t>(impl->storage_offset()));
  }
  if (impl->numel() == 0) return;
  const c10::Storage& storage = impl->unsafe_storage();
  TORCH_CHECK(storage, "Tensor: invalid null storage");
  if (wanted > storage.nbytes()) resize_storage_bytes(storage.unsafeGetStorageImpl(), wanted);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> memory_format) {
  const std::vector<std::int64_t> old_size = self.sizes().vec();
  const std::size_t old_nbytes = self.storage().nbytes();
  try {
    resize_tensor(self.unsafeGetTensorImpl(), size, std::nullopt);
  } catch (...) {  // out of memory: the tensor stays what it was
    if (self.storage().nbytes() == old_nbytes) self.unsafeGetTensorImpl()->set_sizes_contiguous(old_size);
    throw;
  }
  if (memory_format.has_value()) {
    TORCH_CHECK(*memory_format != c10::MemoryFormat::Preserve, "Unsupported memory format", *memory_format);
    self.unsafeGetTensorImpl()->empty_tensor_restride(*memory_format);
  }
  if (C10_UNLIKELY(fills_uninitialized_memory())) at::native::fill_resize_deterministic_(self, static_cast<std::int64_t>(old_nbytes));
  return self;
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

void check_storage_device(const at::Tensor& self, const c10::Storage& source) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(), "\".  This is no longer allowed; the devices must match.");
}

at::Tensor& set_source_storage_offset(at::Tensor& self, c10::Storage source, std::int64_t offset, c10::IntArrayRef size,
                                      c10::IntArrayRef stride) {
  check_storage_device(self, source);
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  TORCH_CHECK(stride.empty() || stride.size() == size.size(), "unequal size length (", size.size(), ") and stride length (", stride.size(),
              ")");
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  resize_tensor(impl, size, stride.size() == size.size() ? at::OptionalIntArrayRef(stride) : std::nullopt);
  return self;
}

at::Tensor& set_source_storage(at::Tensor& self, c10::Storage source) {
  const auto count = static_cast<std::int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_source_storage_offset(self, std::move(source), 0, count, {});
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_source_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::Device device = self.device();
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                             c10::DataPtr(nullptr, nullptr, &delete_device_bytes, device),
                                                             device_allocator(), /*resizable=*/true));
  return set_source_storage_offset(self, std::move(storage), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == kDeviceType, "record_stream: expected a mybackend stream, got one of ", stream.device_type());
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& t) { return t.layout() == c10::kStrided && (t.is_cpu() || t.device().type() == kDeviceType); };
  return dense(self) && dense(from);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("set_.source_Storage", TORCH_FN(set_source_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_source_storage_offset));
  m.impl("set_.source_Tensor", TORCH_FN(set_source_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
}

}  // namespace mybackend::glue
