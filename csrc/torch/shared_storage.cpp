#include "torch/shared_storage.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <utility>

#include "torch/context.h"
#include "torch/device_allocator.h"
#include "torch/lender.h"

namespace mybackend::glue {
namespace {

// What is queued on the devices may still use bytes that are about to go.
void finish_work() {
  if (DeviceMemory* memory = Runtime::get().memory_if_started()) {
    for (int device = 0; device < memory->device_count(); ++device) {
      if (memory->driver().maybe_busy(device)) (void)memory->driver().device_synchronize(device);
    }
  }
}

void delete_owner(void* owner) {
  finish_work();
  delete static_cast<c10::Storage*>(owner);
}

void delete_region(void* region) {
  finish_work();
  delete static_cast<MappedRegion*>(region);
}

c10::DataPtr bytes_over(c10::Storage cpu, c10::DeviceIndex device) {
  TORCH_CHECK_VALUE(cpu.device().is_cpu(), "expected a CPU storage, not one on ", cpu.device());
  check_device_index(device);
  require_host_memory("a device storage over a CPU storage");
  void* data = cpu.mutable_data();
  return {data, new c10::Storage(std::move(cpu)), &delete_owner, c10::Device(kDeviceType, device)};
}

c10::Storage make_storage(std::size_t nbytes, c10::DataPtr bytes) {
  c10::Allocator* allocator = bytes.device().is_cpu() ? c10::GetAllocator(c10::kCPU) : device_allocator();
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes, std::move(bytes), allocator,
                                               /*resizable=*/false);
}

}  // namespace

c10::Storage device_storage_over(c10::Storage cpu, c10::DeviceIndex device) {
  const std::size_t nbytes = cpu.nbytes();
  return make_storage(nbytes, bytes_over(std::move(cpu), device));
}

std::optional<c10::Storage> cpu_backing(const c10::Storage& storage) {
  const c10::DataPtr& bytes = storage.data_ptr();
  if (bytes.get_deleter() != &delete_owner) return std::nullopt;
  return *static_cast<c10::Storage*>(bytes.get_context());
}

void move_storage(const c10::Storage& storage, c10::Storage cpu) {
  TORCH_CHECK_VALUE(storage.device().type() == kDeviceType, "expected a mybackend storage");
  TORCH_CHECK_VALUE(cpu.nbytes() >= storage.nbytes(), "the CPU storage is too small");
  require_host_memory("sharing a storage with other processes");
  const c10::DeviceIndex device = storage.device().index();
  check(memory().driver().device_synchronize(device));
  if (storage.nbytes() > 0) std::memcpy(cpu.mutable_data(), storage.data(), storage.nbytes());
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(bytes_over(std::move(cpu), device));
  impl->set_resizable(false);
}

c10::Storage map_file(const std::string& path, const std::string& access, std::size_t offset, std::size_t bytes, c10::Device device) {
  TORCH_CHECK_VALUE(access == "private" || access == "shared" || access == "readonly",
                    "access: expected private, shared or readonly, not '", access, "'");
  if (!device.is_cpu()) {
    check_device_index(device.index());
    require_host_memory("a storage over a file's mapping");
  }
  std::unique_ptr<MappedRegion> region;
  const MapAccess mode = access == "private" ? MapAccess::kPrivate : access == "shared" ? MapAccess::kShared : MapAccess::kReadOnly;
  check(MappedRegion::map_file(path, mode, offset, bytes, &region));
  void* data = region->data();
  return make_storage(bytes, {data, region.release(), &delete_region, device});
}

MappedRegion* region_of(const c10::Storage& storage) noexcept {
  const c10::DataPtr& bytes = storage.data_ptr();
  return bytes.get_deleter() == &delete_region ? static_cast<MappedRegion*>(bytes.get_context()) : nullptr;
}

void advise(const c10::Storage& storage, const std::string& advice) {
  constexpr std::pair<const char*, MapAdvice> known[] = {{"normal", MapAdvice::kNormal},
                                                         {"random", MapAdvice::kRandom},
                                                         {"sequential", MapAdvice::kSequential},
                                                         {"willneed", MapAdvice::kWillNeed},
                                                         {"hugepages", MapAdvice::kHugePages}};
  for (const auto& [name, value] : known) {
    if (advice == name) return check(advise_pages(storage.data(), storage.nbytes(), value));
  }
  TORCH_CHECK_VALUE(false, "advice: expected normal, random, sequential, willneed or hugepages, not '", advice, "'");
}

void sync(const c10::Storage& storage) {
  MappedRegion* region = region_of(storage);
  TORCH_CHECK_VALUE(region != nullptr, "the storage is not over a mapping of mybackend.storage.from_file or torch.from_file");
  check(region->sync());
}

namespace {

// torch.from_file: with shared, what is written is in the file; else it stays in the process.
at::Tensor from_file(std::string_view filename, std::optional<bool> shared, std::optional<std::int64_t> size,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
                     std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout.has_value() || *layout == c10::kStrided, "mybackend does not support the layout ", *layout);
  TORCH_CHECK(!pin_memory.value_or(false), "tensors constructed from a file cannot be pinned");
  const std::int64_t count = size.value_or(0);
  TORCH_CHECK_VALUE(count >= 0, "from_file: size must not be negative, but is ", count);
  const c10::DeviceIndex index = device.has_value() ? resolve_device(*device) : current_device();
  const auto options = at::TensorOptions().dtype(c10::dtype_or_default(dtype)).device(c10::Device(kDeviceType, index));
  at::Tensor result = at::empty({0}, options);
  if (count == 0) return result;
  const std::size_t item_bytes = options.dtype().itemsize();
  TORCH_CHECK_VALUE(static_cast<std::uint64_t>(count) <= static_cast<std::uint64_t>(INT64_MAX) / item_bytes, "from_file: size ", count,
                    " overflows");
  const std::size_t bytes = static_cast<std::size_t>(count) * item_bytes;
  result.set_(map_file(std::string(filename), shared.value_or(false) ? "shared" : "private", 0, bytes, options.device()), 0, {count}, {1});
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("from_file", TORCH_FN(from_file));
}

}  // namespace mybackend::glue
