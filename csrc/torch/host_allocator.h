// The host allocator behind pin_memory(), is_pinned() and DataLoader(pin_memory=True).
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace mybackend::glue {

c10::Allocator* host_allocator() noexcept;
bool is_own_pinned_pointer(const void* ptr) noexcept;
// `stream` uses the pinned block that ptr points into from now on: after its free it is reused
// only when that is done. False when ptr points into none.
bool record_pinned_use(const void* ptr, c10::Stream stream);
// Ours, or (on a CUDA build, where this device's hooks are asked first) CUDA's.
bool is_pinned_pointer(const void* ptr) noexcept;

}  // namespace mybackend::glue
