// Memory history for people: captured stacks, and snapshots in torch.cuda.memory's schema.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mybackend::glue {

// What torch.cuda.memory._record_memory_history takes. `when`: never, state, alloc or all;
// `all_stacks`: C++ frames too. Starts on all devices.
void start_history(std::size_t max_entries, const std::string& when, bool all_stacks, bool clear_old,
                   const std::vector<std::string>& skipped);
void stop_history();

// {"segments": ..., "device_traces": ..., "allocator_settings": ..., "external_annotations": ...}
pybind11::dict snapshot(bool with_traces);

}  // namespace mybackend::glue
