// The host allocator behind pin_memory(), is_pinned() and DataLoader(pin_memory=True).
#pragma once

#include <c10/core/Allocator.h>

namespace mybackend::glue {

c10::Allocator* host_allocator() noexcept;
// Ours, or (on a CUDA build, where this device's hooks are asked first) CUDA's.
bool is_pinned_pointer(const void* ptr) noexcept;

}  // namespace mybackend::glue
