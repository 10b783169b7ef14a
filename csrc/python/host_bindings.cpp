// Bindings of host memory: the CPU allocator, pinned memory, memory plans, mapped and shared storage.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>

#include "capi/runtime.h"
#include "core/cpu_allocator.h"
#include "core/ipc_event.h"
#include "python/bindings.h"
#include "torch/cpu_allocator.h"
#include "torch/plan.h"
#include "torch/shared_storage.h"

namespace mybackend {

void bind_host_memory(py::module_& m) {
  m.def("_cpu_install", &glue::install_pooling);
  m.def("_cpu_uninstall", &glue::uninstall_pooling);
  m.def("_cpu_is_installed", &glue::is_pooling);
  m.def("_cpu_trim", [] { return cpu_allocator::trim(); }, py::call_guard<py::gil_scoped_release>());
  m.def("_cpu_reset_peak", [] { cpu_allocator::tracker().reset_peak(); });
  m.def("_cpu_tracker_stats", [] { return tracker_dict(cpu_allocator::tracker().stats()); });
  m.def("_cpu_cache_stats", [] {
    const HostCache::Stats s = cpu_allocator::large_cache().stats();
    py::dict d;
    d["live_bytes"] = s.live_bytes;
    d["cached_bytes"] = s.cached_bytes;
    d["hits"] = s.hits;
    d["misses"] = s.misses;
    d["evictions"] = s.evictions;
    d["max_cached_bytes"] = s.max_cached_bytes;
    py::list classes;
    for (const auto& c : s.classes) {
      py::dict e;
      e["block_bytes"] = c.block_bytes;
      e["hits"] = c.hits;
      e["misses"] = c.misses;
      e["live_blocks"] = c.live_blocks;
      e["cached_blocks"] = c.cached_blocks;
      classes.append(e);
    }
    d["classes"] = classes;
    return d;
  });

  m.def("_pinned_stats", [] {
    const PinnedStats s = Runtime::get().pinned().stats();
    py::dict d;
    const auto counter = [&](const char* name, const PinnedCounter& c) {
      const std::string prefix = std::string(name) + ".";
      d[py::str(prefix + "current")] = c.current;
      d[py::str(prefix + "peak")] = c.peak;
      d[py::str(prefix + "allocated")] = c.allocated;
      d[py::str(prefix + "freed")] = c.freed;
    };
    const auto duration = [&](const char* name, const PinnedDuration& t) {
      const std::string prefix = std::string(name) + ".";
      d[py::str(prefix + "total")] = t.total;
      d[py::str(prefix + "max")] = t.max;
      d[py::str(prefix + "min")] = t.min;
      d[py::str(prefix + "count")] = t.count;
      d[py::str(prefix + "avg")] = t.count > 0 ? static_cast<double>(t.total) / static_cast<double>(t.count) : 0.0;
    };
    counter("active_requests", s.active_requests);
    counter("active_bytes", s.active_bytes);
    counter("requested_bytes", s.requested_bytes);
    counter("allocations", s.segments);
    counter("allocated_bytes", s.reserved_bytes);
    duration("host_alloc_time", s.host_alloc_us);
    duration("host_free_time", s.host_free_us);
    d["num_host_alloc"] = s.host_alloc_us.count;
    d["num_host_free"] = s.host_free_us.count;
    d["num_hits"] = s.hits;
    d["num_misses"] = s.misses;
    d["num_evictions"] = s.evictions;
    d["cached_bytes"] = s.cached_bytes;
    d["unlocked_bytes"] = s.unlocked_bytes;
    return d;
  });
  m.def("_pinned_empty_cache", [] { Runtime::get().pinned().empty_cache(); }, py::call_guard<py::gil_scoped_release>());
  m.def("_pinned_block_bytes", [](std::size_t bytes) { return PinnedCache::block_bytes(bytes, Runtime::get().pinned().settings()); });
  m.def("_pinned_reset_peak", [] { Runtime::get().pinned().reset_peak(); });
  m.def("_pinned_reset_accumulated", [] { Runtime::get().pinned().reset_accumulated(); });
}

// Memory plans; `target` is -1 for the CPU, else a device.
void bind_plans(py::module_& m) {
  py::class_<glue::Plan>(m, "_Plan")
      .def(py::init([](int target, const std::vector<std::tuple<std::size_t, std::int64_t, std::int64_t, std::size_t>>& allocations,
                       std::size_t arena_bytes, std::size_t lower_bound_bytes, std::size_t peak_live_bytes) {
        MemoryPlan plan;
        plan.arena_bytes = arena_bytes;
        plan.lower_bound_bytes = lower_bound_bytes;
        plan.peak_live_bytes = peak_live_bytes;
        for (const auto& [bytes, begin, end, offset] : allocations) plan.allocations.push_back({bytes, begin, end, offset});
        return std::make_unique<glue::Plan>(target, std::move(plan));
      }))
      .def("enter", &glue::Plan::enter)
      .def("leave", &glue::Plan::leave)
      .def_property_readonly("target", &glue::Plan::target)
      .def_property_readonly("arena_bytes", [](const glue::Plan& self) { return self.plan().arena_bytes; })
      .def_property_readonly("lower_bound_bytes", [](const glue::Plan& self) { return self.plan().lower_bound_bytes; })
      .def_property_readonly("peak_live_bytes", [](const glue::Plan& self) { return self.plan().peak_live_bytes; })
      .def_property_readonly("allocations",
                             [](const glue::Plan& self) {
                               py::list list;
                               for (const PlannedAllocation& a : self.plan().allocations) {
                                 list.append(py::make_tuple(a.bytes, a.begin, a.end, a.offset));
                               }
                               return list;
                             })
      .def_property_readonly("counts", [](const glue::Plan& self) {
        const PlanCounts counts = self.counts();
        py::dict d;
        d["served"] = counts.served;
        d["escaping"] = counts.escaping;
        d["fell_through"] = counts.fell_through;
        return d;
      });
  m.def("_plan_start", &glue::Plan::start_recording);
  m.def("_plan_cancel", &glue::Plan::cancel_recording);
  m.def("_plan_finish", &glue::Plan::finish_recording, py::call_guard<py::gil_scoped_release>());
}

void bind_storage(py::module_& m) {
  // Events between processes.
  py::class_<IpcEvent, std::shared_ptr<IpcEvent>>(m, "_IpcEvent")
      .def_static("create",
                  [] {
                    std::shared_ptr<IpcEvent> event;
                    check_or_throw(IpcEvent::create(&event));
                    return event;
                  })
      .def_static("open",
                  [](const std::string& handle) {
                    std::shared_ptr<IpcEvent> event;
                    check_or_throw(IpcEvent::open(handle, &event));
                    return event;
                  })
      .def_property_readonly("handle", &IpcEvent::handle)
      .def("query", &IpcEvent::query)
      .def("synchronize", &IpcEvent::synchronize, py::call_guard<py::gil_scoped_release>())
      .def("record",
           [](const std::shared_ptr<IpcEvent>& self, const c10::Stream& stream) {
             check_or_throw(IpcEvent::record(self, &glue::memory().driver(), stream.device_index(), glue::to_handle(stream)));
           })
      .def("wait", [](const std::shared_ptr<IpcEvent>& self, const c10::Stream& stream) {
        check_or_throw(IpcEvent::wait(self, &glue::memory().driver(), stream.device_index(), glue::to_handle(stream)));
      });

  // Storages over other storages' bytes, and over mappings (mybackend/storage.py).
  m.def("_storage_over", [](const py::object& cpu_storage, int device) {
    return py::reinterpret_steal<py::object>(
        torch::createPyObject(glue::device_storage_over(torch::createStorage(cpu_storage.ptr()), static_cast<c10::DeviceIndex>(device))));
  });
  m.def("_storage_backing", [](const py::object& storage) -> py::object {
    const std::optional<c10::Storage> backing = glue::cpu_backing(torch::createStorage(storage.ptr()));
    return backing.has_value() ? py::reinterpret_steal<py::object>(torch::createPyObject(*backing)) : py::none();
  });
  m.def("_storage_move", [](const py::object& storage, const py::object& cpu_storage) {
    glue::move_storage(torch::createStorage(storage.ptr()), torch::createStorage(cpu_storage.ptr()));
  });
  m.def("_storage_region", [](const py::object& storage) -> py::object {
    const MappedRegion* region = glue::region_of(torch::createStorage(storage.ptr()));
    if (region == nullptr) return py::none();
    py::dict d;
    d["path"] = region->path();
    d["is_shared"] = region->access() == MapAccess::kShared;
    return d;
  });
  m.def("_storage_resident_bytes", [](const py::object& storage) {
    const c10::Storage bytes = torch::createStorage(storage.ptr());
    return resident_bytes(bytes.data(), bytes.nbytes());
  });
  m.def("_storage_advise",
        [](const py::object& storage, const std::string& advice) { glue::advise(torch::createStorage(storage.ptr()), advice); });
  m.def("_storage_sync", [](const py::object& storage) { glue::sync(torch::createStorage(storage.ptr())); });
  m.def("_map_file",
        [](const std::string& path, const std::string& access, std::size_t offset, std::size_t bytes, std::optional<int> device) {
          const c10::Device where =
              device.has_value() ? c10::Device(glue::kDeviceType, static_cast<c10::DeviceIndex>(*device)) : c10::Device(c10::kCPU);
          return py::reinterpret_steal<py::object>(torch::createPyObject(glue::map_file(path, access, offset, bytes, where)));
        });
}

}  // namespace mybackend
