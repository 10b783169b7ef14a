// The c10 face of DeviceMemory: the one allocator registered for PrivateUse1.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include "core/device_memory.h"

namespace mybackend::glue {

// The deleter of every DataPtr of device memory; its context is the data pointer.
void delete_device_bytes(void* ptr) noexcept;

// `nbytes` on `device`'s current stream, or kind in force; throws OutOfMemoryError. The DataPtr
// says it lives on `labelled`: the device, or the CPU while a kernel is borrowed.
c10::DataPtr allocate_device_bytes(c10::DeviceIndex device, std::size_t nbytes, c10::Device labelled);

c10::DeviceAllocator* device_allocator() noexcept;

}  // namespace mybackend::glue
