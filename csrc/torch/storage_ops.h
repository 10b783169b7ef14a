#pragma once

#include <c10/core/StorageImpl.h>

namespace mybackend::glue {

// Gives a device storage `nbytes` bytes, keeping what fits. On an error nothing changes.
void resize_storage_bytes(c10::StorageImpl* storage, std::size_t nbytes);

}  // namespace mybackend::glue
