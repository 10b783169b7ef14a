// What the files of bindings share.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "core/tracker.h"
#include "torch/context.h"

namespace py = pybind11;

namespace mybackend {

inline void check_or_throw(const Status& status) {
  if (status.ok()) return;
  if (status.code() == StatusCode::kInvalidArgument) throw py::value_error(status.message());
  glue::raise(status);
}

inline py::dict tracker_dict(const TrackerStats& s) {
  py::dict d;
  d["current_bytes"] = s.current_bytes;
  d["peak_bytes"] = s.peak_bytes;
  d["total_allocated_bytes"] = s.total_allocated_bytes;
  d["total_freed_bytes"] = s.total_freed_bytes;
  d["allocation_count"] = s.allocation_count;
  d["free_count"] = s.free_count;
  return d;
}

// host_bindings.cpp
void bind_host_memory(py::module_& m);  // the CPU allocator and pinned memory
void bind_plans(py::module_& m);
void bind_storage(py::module_& m);  // storages over other bytes, events between processes

}  // namespace mybackend
