#pragma once

namespace mybackend::glue {

// Lets torch's own allocator settings (torch._C._accelerator_setAllocatorSettings) reach our
// configuration, after whatever hook is registered already. Once.
void register_config_hook();

}  // namespace mybackend::glue
