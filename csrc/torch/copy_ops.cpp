// Copies between the device and the CPU, and between devices.
//
// The bytes of a sim device are host memory, so the CPU's copy kernel does the work (layout,
// dtype, conjugation and all) on aliases. It runs when the earlier work of both devices'
// current streams is done.
//
// With non_blocking=True, what is a plain copy of bytes (same dtype and layout, no gaps) is
// queued on the current stream and returns at once: between pinned memory and a device, and
// between two devices. As on CUDA, the caller keeps the device's tensors, or says
// record_stream; pinned blocks look after themselves. Pageable memory is copied before
// returning.
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_ops.h>
#include <torch/library.h>

#include "torch/borrow.h"
#include "torch/context.h"
#include "torch/host_allocator.h"
#include "torch/profiler.h"
#include "torch/typed_borrow.h"

namespace mybackend::glue {
namespace {

bool on_device(const at::Tensor& tensor) {
  return tensor.device().type() == kDeviceType;
}

void check_copyable(const at::Tensor& tensor) {
  // On a GPU, torch.cuda's tensors lie in the same memory.
  TORCH_CHECK_NOT_IMPLEMENTED(on_device(tensor) || tensor.is_cpu() || (on_gpu() && tensor.is_cuda()),
                              "mybackend cannot copy from or to a tensor on ", tensor.device());
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided, "mybackend cannot copy a tensor of layout ", tensor.layout());
}

// What is queued on `later` from now on starts after what is queued on `earlier` now.
Status order(Driver& driver, c10::DeviceIndex earlier_device, StreamHandle earlier, c10::DeviceIndex later_device, StreamHandle later) {
  EventHandle event = 0;
  Status status = driver.event_create(earlier_device, &event);
  if (!status.ok()) return status;
  status = driver.event_record(earlier_device, event, earlier);
  if (status.ok()) status = driver.stream_wait_event(later_device, later, event);
  driver.event_destroy(earlier_device, event);
  return status;
}

at::Tensor& copy_aliases(at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
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
  at::_ops::copy_::redispatch(lender_keys(), const_cast<at::Tensor&>(*dst_alias), *src_alias, non_blocking);
  return dst;
}

at::Tensor& copy_now(at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
  if (C10_LIKELY(!dst.is_cuda() && !src.is_cuda())) return copy_aliases(dst, src, non_blocking);
  // torch.cuda's work goes on on a stream of its own.
  const c10::DeviceIndex device = dst.is_cuda() ? dst.device().index() : src.device().index();
  const StreamHandle theirs = lender_stream(device), ours = current_stream(device);
  Driver& driver = memory().driver();
  if (theirs != ours) check(order(driver, device, theirs, device, ours));
  copy_aliases(dst, src, non_blocking);
  if (theirs != ours) check(order(driver, device, ours, device, theirs));
  return dst;
}

// Whether the elements of both lie in the same order without gaps, so that bytes can be copied.
bool is_plain_copy(const at::Tensor& dst, const at::Tensor& src) {
  return dst.scalar_type() == src.scalar_type() && dst.sizes() == src.sizes() && dst.strides() == src.strides() &&
         dst.is_non_overlapping_and_dense() && dst.is_conj() == src.is_conj() && dst.is_neg() == src.is_neg() && dst.numel() > 0;
}

// The driver's copy; in a profile between two tasks that look at the clock.
Status copy_on_stream(Driver& driver, c10::DeviceIndex device, StreamHandle stream, void* to, const void* from, std::size_t bytes) {
  if (!is_profiling() || on_gpu()) return driver.copy_async(device, stream, to, from, bytes);
  auto begin_ns = std::make_shared<std::int64_t>(0);
  const std::uint64_t correlation = profiler_correlation();
  Status status = driver.stream_enqueue(device, stream, "profiler", [begin_ns] { *begin_ns = profiler_now(); });
  if (status.ok()) status = driver.copy_async(device, stream, to, from, bytes);
  if (status.ok()) {
    status = driver.stream_enqueue(device, stream, "profiler", [=] {
      record_kernel("copy", KernelKind::kCopy, device, stream, *begin_ns, profiler_now(), correlation);
    });
  }
  return status;
}

// Queues the copy, if it can be. False: it has to be done now.
bool copy_async(at::Tensor& dst, const at::Tensor& src) {
  const bool to_device = on_device(dst), from_device = on_device(src);
  if (dst.is_cuda() || src.is_cuda()) return false;
  if (to_device == from_device && dst.device() == src.device()) return false;  // runs inline, like any operator
  if (!is_plain_copy(dst, src)) return false;
  Driver& driver = memory().driver();
  const c10::DeviceIndex device = from_device ? src.device().index() : dst.device().index();
  const StreamHandle stream = current_stream(device);
  const void* from = src.const_data_ptr();
  void* to = dst.mutable_data_ptr();
  const c10::Stream torch_stream = to_stream(device, stream);
  if (!to_device) {
    if (!is_own_pinned_pointer(to) || !record_pinned_use(to, torch_stream)) return false;
    check(copy_on_stream(driver, device, stream, to, from, dst.nbytes()));
  } else if (!from_device) {
    if (!is_own_pinned_pointer(from) || !record_pinned_use(from, torch_stream)) return false;
    check(copy_on_stream(driver, device, stream, to, from, dst.nbytes()));
  } else {
    // On the source's stream, after what the destination's has queued; and that goes on after
    // the copy.
    const c10::DeviceIndex other = dst.device().index();
    const StreamHandle other_stream = current_stream(other);
    Status status = order(driver, other, other_stream, device, stream);
    if (status.ok()) status = copy_on_stream(driver, device, stream, to, from, dst.nbytes());
    if (status.ok()) status = order(driver, device, stream, other, other_stream);
    check(status);
  }
  return true;
}

// A kernel of CUDA's may still read or write pinned memory when it returns; CUDA's own host allocator
// is told by the kernel, ours here.
void record_pinned_uses(const at::Tensor& dst, const at::Tensor& src) {
  const at::Tensor& cpu = dst.is_cpu() ? dst : src;
  const at::Tensor& device = dst.is_cpu() ? src : dst;
  if (!cpu.is_cpu() || !on_device(device) || !cpu.has_storage()) return;
  const c10::DeviceIndex index = device.device().index();
  (void)record_pinned_use(cpu.const_data_ptr(), to_stream(index, current_stream(index)));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  check_copyable(self);
  check_copyable(dst);
  at::Tensor target = dst;
  if (non_blocking && copy_async(target, self)) return target;
  copy_now(target, self, non_blocking);
  if (non_blocking && on_gpu()) record_pinned_uses(target, self);
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
  if (non_blocking && copy_async(self, src)) return self;
  copy_now(self, src, non_blocking);
  if (non_blocking && on_gpu()) record_pinned_uses(self, src);
  return self;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("copy_", TORCH_FN(copy_));
}

}  // namespace mybackend::glue
