// Device storages over bytes that are not from the device's allocator: a CPU storage's (a mapped
// checkpoint, shared memory of torch.multiprocessing), or a mapping of our own. No byte is
// copied; the owner lives as long as the last such storage.
#pragma once

#include <c10/core/Storage.h>

#include <optional>
#include <string>

#include "core/mapped_region.h"

namespace mybackend::glue {

// A storage on the device over the CPU storage's bytes. It cannot be resized.
c10::Storage device_storage_over(c10::Storage cpu, c10::DeviceIndex device);
// The CPU storage below it, if it was made by device_storage_over() or move_storage().
std::optional<c10::Storage> cpu_backing(const c10::Storage& storage);
// The storage's bytes are copied into the CPU storage (of at least the same size), and live there
// from now on, under the storage and every view of it.
void move_storage(const c10::Storage& storage, c10::Storage cpu);

// A storage over bytes [offset, offset + bytes) of a file, on one of our devices or on the CPU.
// `access`: private, shared or readonly.
c10::Storage map_file(const std::string& path, const std::string& access, std::size_t offset, std::size_t bytes, c10::Device device);
// The mapping below the storage, or nullptr.
MappedRegion* region_of(const c10::Storage& storage) noexcept;
// `advice`: normal, random, sequential, willneed or hugepages. For storages whose bytes are mapped.
void advise(const c10::Storage& storage, const std::string& advice);
void sync(const c10::Storage& storage);

}  // namespace mybackend::glue
