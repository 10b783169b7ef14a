// mybackend._C: what the Python package calls. Bindings and conversions, no logic.
#include <torch/csrc/Exceptions.h>

#include <torch/csrc/utils/pybind.h>
#include <future>
#include <stdexcept>
#include <thread>
#include <utility>

#include "python/bindings.h"

#include "capi/mybackend.h"
#include "capi/runtime.h"
#include "core/aligned_bytes.h"
#include "core/cpu_pool.h"
#include "driver/sim/sim_driver.h"
#include "replay/replay.h"
#include "torch/borrow.h"
#include "torch/boxed_borrow.h"
#include "torch/config_hook.h"
#include "torch/context.h"
#include "torch/generator.h"
#include "torch/history.h"
#include "torch/lender.h"

using namespace mybackend;
namespace glue = mybackend::glue;

namespace {

py::dict stat_dict(const caching::Stat& stat) {
  py::dict d;
  d["current"] = stat.current;
  d["peak"] = stat.peak;
  d["allocated"] = stat.allocated;
  d["freed"] = stat.freed;
  return d;
}

py::dict stat_array_dict(const caching::StatArray& stats) {
  static constexpr const char* kPools[] = {"all", "small_pool", "large_pool"};
  py::dict by_pool;
  for (int i = 0; i < caching::kStatPoolCount; ++i) by_pool[kPools[i]] = stat_dict(stats[static_cast<std::size_t>(i)]);
  return by_pool;
}

py::dict stats_dict(const caching::DeviceStats& stats) {
  py::dict result;
#define X(name) result[#name] = stat_array_dict(stats.name);
  MYBACKEND_STAT_ARRAYS(X)
#undef X
#define X(name) result[#name] = stat_dict(stats.name);
  MYBACKEND_STAT_SINGLES(X)
#undef X
#define X(name) result[#name] = stats.name;
  MYBACKEND_STAT_COUNTS(X)
#undef X
  result["max_split_size"] = stats.max_split_size;
  return result;
}

py::dict memory_stats(int device) {
  glue::check_device_index(static_cast<c10::DeviceIndex>(device));
  caching::CachingAllocator& allocator = glue::memory().caching(device);
  py::dict result = stats_dict(glue::memory().stats(device));
  py::dict by_pool;
  for (const auto& [id, stats] : allocator.private_pool_reserved_bytes())
    by_pool[py::str(std::to_string(id.first) + "_" + std::to_string(id.second))] = stat_array_dict(stats);
  result["reserved_bytes_by_private_pools"] = by_pool;
  return result;
}

// What allocate_aligned_bytes gives, as a Python object with the buffer protocol.
struct AlignedBytes {
  std::shared_ptr<std::byte[]> block;
  std::size_t nbytes;
};

AlignedBytes allocate_aligned(py::int_ nbytes, const std::string& device) {
  if (device != "cpu" && device != "gpu") throw py::value_error("device: expected 'cpu' or 'gpu', not '" + device + "'");
  const long long wanted = PyLong_AsLongLong(nbytes.ptr());
  if (wanted == -1 && PyErr_Occurred()) throw py::error_already_set();
  if (wanted < 0) throw py::value_error("nbytes: expected a number from 0, not " + std::to_string(wanted));
  const auto size = static_cast<std::size_t>(wanted);
  try {
    return {allocate_aligned_bytes(size, device == "cpu" ? mybackend::Device::CPU : mybackend::Device::GPU), size};
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

void bind_replay(py::module_& m) {
  m.def(
      "_replay",
      [](const std::string& text, const std::string& conf, std::size_t capacity, bool check_invariants) {
        replay::Trace trace;
        replay::ReplayResult r;
        Status status;
        {
          py::gil_scoped_release release;
          status = replay::parse_trace(text, &trace);
          if (status.ok()) status = replay::run(trace, {conf, capacity, check_invariants}, &r);
        }
        check_or_throw(status);
        py::dict result, driver;
        result["stats"] = stats_dict(r.stats);
        driver["malloc"] = r.driver.malloc;
        driver["free"] = r.driver.free;
        driver["map"] = r.driver.map;
        driver["unmap"] = r.driver.unmap;
        result["driver"] = driver;
        py::list segments;
        for (const caching::SegmentInfo& s : r.segments) {
          py::dict d;
          d["address"] = s.address;
          d["total_size"] = s.total_bytes;
          d["stream"] = s.stream;
          d["large"] = s.is_large ? 1 : 0;
          d["expandable"] = s.is_expandable ? 1 : 0;
          py::list pool, blocks;
          pool.append(s.pool_id.first);
          pool.append(s.pool_id.second);
          d["pool"] = pool;
          for (const caching::BlockInfo& b : s.blocks) {
            py::list block;
            block.append(b.bytes);
            block.append(b.requested_bytes);
            block.append(b.allocated ? 1 : 0);
            block.append(b.active ? 1 : 0);
            blocks.append(block);
          }
          d["blocks"] = blocks;
          segments.append(d);
        }
        result["segments"] = segments;
        py::list ooms;
        for (std::int64_t id : r.oom_ids) ooms.append(id);
        result["oom"] = ooms;
        result["oom_text"] = r.oom_text;
        // The compact JSON that the hash is taken over, made here: a list of a million small lists
        // would take seconds to build.
        std::string json = "[";
        for (const caching::TraceEntry& a : r.actions) {
          if (json.size() > 1) json += ',';
          json += std::string("[\"") + caching::kActionNames[static_cast<int>(a.action)] + "\"," + std::to_string(a.address) + ',' +
                  std::to_string(a.bytes) + ',' + std::to_string(a.stream) + ']';
        }
        json += ']';
        result["n_actions"] = r.actions.size();
        result["actions_json"] = json;
        return result;
      },
      py::arg("text"), py::arg("conf"), py::arg("capacity"), py::arg("check_invariants"));
  m.def("_thread_throughput", [](int threads, long pairs) {
    py::gil_scoped_release release;
    return replay::thread_throughput(threads, pairs);
  });
  m.def("_replay_benchmark", [](const std::string& text, const std::string& conf, std::size_t capacity, int repeat) {
    double ns = 0;
    Status status;
    {
      py::gil_scoped_release release;
      replay::Trace trace;
      status = replay::parse_trace(text, &trace);
      if (status.ok()) status = replay::benchmark(trace, {conf, capacity, false}, repeat, &ns);
    }
    check_or_throw(status);
    return ns;
  });
}

void bind_config(py::module_& m) {
  m.def("_config_keys", [] {
    py::list result;
    for (const ConfigKey& key : config_keys()) {
      py::dict d;
      d["name"] = key.name;
      d["group"] = key.group;
      d["range"] = key.range;
      d["meaning"] = key.meaning;
      d["default"] = key.default_value;
      result.append(d);
    }
    return result;
  });
  m.def("_config_find", [](const std::string& name) -> py::object {
    const ConfigKey* key = find_config_key(name);
    return key != nullptr ? py::object(py::str(key->name)) : py::none();
  });
  m.def("_config_suggest", [](const std::string& name) { return suggest_config_key(name); });
  m.def("_config_check", [](const std::string& text) {
    Settings settings = Runtime::get().config().settings();
    check_or_throw(parse_settings(text, &settings));
    return settings_warnings(settings);
  });
  m.def("_config_set", [](const std::string& text, const std::string& origin) {
    check_or_throw(Runtime::get().configure(text, origin));
    return settings_warnings(Runtime::get().config().settings());
  });
  m.def("_config_reset", [] { Runtime::get().config().reset(); });
  m.def("_config_json", [] { return settings_json(Runtime::get().config().settings()); });
  m.def("_config_text", [](const std::string& key) { return setting_text(Runtime::get().config().settings(), key); });
  m.def("_config_origin", [](const std::string& key) { return Runtime::get().config().origin(key); });
  m.def("_config_read_environment", [] { check_or_throw(Runtime::get().read_environment()); });
}

void bind_memory(py::module_& m) {
  m.def("_memory_stats", &memory_stats);
  m.def("_tracker_stats", [](int device) {
    glue::check_device_index(static_cast<c10::DeviceIndex>(device));
    return tracker_dict(glue::memory().tracker(device).stats());
  });
  m.def("_reset_peak_memory_stats", [](int device) {
    glue::check_device_index(static_cast<c10::DeviceIndex>(device));
    glue::memory().for_each_caching(device, [](auto& c) { c.reset_peak_stats(); });
    glue::memory().tracker(device).reset_peak();
  });
  m.def("_reset_accumulated_memory_stats", [](int device) {
    glue::check_device_index(static_cast<c10::DeviceIndex>(device));
    glue::memory().for_each_caching(device, [](auto& c) { c.reset_accumulated_stats(); });
    glue::memory().tracker(device).reset_totals();
  });
  m.def("_empty_cache", [] {
    py::gil_scoped_release release;
    for (int device = 0; device < glue::memory().device_count(); ++device)
      glue::memory().for_each_caching(device, [](auto& c) { c.empty_cache(); });
  });
  m.def("_set_memory_fraction", [](double fraction, int device) {
    glue::check_device_index(static_cast<c10::DeviceIndex>(device));
    check_or_throw(glue::memory().caching(device).set_memory_fraction(fraction));
  });
  m.def("_get_memory_fraction", [](int device) {
    glue::check_device_index(static_cast<c10::DeviceIndex>(device));
    return glue::memory().caching(device).memory_fraction();
  });
  m.def("_memory_info", [](int device) {
    glue::check_device_index(static_cast<c10::DeviceIndex>(device));
    MemoryInfo info;
    glue::check(glue::memory().driver().memory_info(device, &info));
    return py::make_tuple(info.free_bytes, info.total_bytes);
  });
  m.def("_check_invariants", [](int device) {
    std::string wrong;
    glue::memory().for_each_caching(device, [&](auto& c) { wrong += c.check_invariants(); });
    return wrong;
  });
  m.def("_copied_output_count", &glue::copied_output_count);
  m.def("_memory_kind", [] { return std::string(memory_kind_name(glue::memory().kind_in_force())); });

  struct KindScope {
    std::unique_ptr<ScopedMemoryKind> scope;
  };
  py::class_<KindScope>(m, "_KindScope").def("leave", [](KindScope& self) { self.scope.reset(); });
  m.def("_enter_memory_kind", [](const std::string& name, std::optional<std::string> folder) {
    const auto kind = memory_kind_from_name(name);
    if (!kind.has_value()) throw py::value_error("memory kind: expected caching, pool or mmap, not '" + name + "'");
    return KindScope{std::make_unique<ScopedMemoryKind>(*kind, std::move(folder))};
  });

  py::class_<AlignedBytes>(m, "AlignedBytes", py::buffer_protocol(),
                           "An aligned block of host memory; len() and the buffer protocol give its bytes.")
      .def_buffer([](AlignedBytes& self) {
        return py::buffer_info(self.block.get(), 1, py::format_descriptor<std::uint8_t>::format(), 1,
                               {static_cast<py::ssize_t>(self.nbytes)}, {py::ssize_t{1}});
      })
      .def("__len__", [](const AlignedBytes& self) { return self.nbytes; })
      .def("__bool__", [](const AlignedBytes& self) { return self.block != nullptr; })
      .def_property_readonly("address", [](const AlignedBytes& self) { return reinterpret_cast<std::uintptr_t>(self.block.get()); })
      .def_property_readonly("capacity", [](const AlignedBytes& self) { return self.block ? cpu_pool::capacity_bytes(self.nbytes) : 0; });
  m.def("allocate_aligned_bytes", &allocate_aligned, py::arg("nbytes"), py::arg("device") = "cpu");
  m.def("_aligned_bytes_stats", [](const std::string& device) {
    return tracker_dict(aligned_bytes_tracker(device == "gpu" ? mybackend::Device::GPU : mybackend::Device::CPU).stats());
  });
  m.def("_cpu_pool_stats", [] {
    const cpu_pool::Stats s = cpu_pool::stats();
    py::dict d;
    d["hits"] = s.hits;
    d["misses"] = s.misses;
    d["large"] = s.large;
    d["cached_bytes"] = s.cached_bytes;
    d["threads"] = s.threads;
    py::list classes;
    for (const auto& c : s.classes) {
      py::dict e;
      e["block_bytes"] = c.block_bytes;
      e["hits"] = c.hits;
      e["misses"] = c.misses;
      e["cached_blocks"] = c.cached_blocks;
      classes.append(e);
    }
    d["classes"] = classes;
    return d;
  });
}

caching::PoolId pool_id(const py::tuple& id) {
  return {id[0].cast<std::uint64_t>(), id[1].cast<std::uint64_t>()};
}

// Private pools; `device` was checked by the caller.
void bind_pools(py::module_& m) {
  m.def("_pool_create", [](int device, const py::tuple& id, bool use_on_oom, bool no_split) {
    glue::check_device_index(static_cast<c10::DeviceIndex>(device));
    glue::memory().caching(device).create_or_use_pool(pool_id(id), no_split, use_on_oom);
  });
  m.def("_pool_begin", [](int device, const py::tuple& id) {
    const std::thread::id self = std::this_thread::get_id();
    check_or_throw(glue::memory().caching(device).begin_allocate_to_pool(
        pool_id(id), [self](StreamHandle) { return std::this_thread::get_id() == self; }));
  });
  m.def("_pool_end",
        [](int device, const py::tuple& id) { check_or_throw(glue::memory().caching(device).end_allocate_to_pool(pool_id(id))); });
  m.def("_pool_release", [](int device, const py::tuple& id) { check_or_throw(glue::memory().caching(device).release_pool(pool_id(id))); });
  m.def("_pool_use_count", [](int device, const py::tuple& id) { return glue::memory().caching(device).pool_use_count(pool_id(id)); });
  m.def("_pool_empty_cache", [](int device, const py::tuple& id) {
    const caching::PoolId pool = pool_id(id);
    py::gil_scoped_release release;
    glue::memory().caching(device).empty_cache(pool);
  });
}

void bind_history(py::module_& m) {
  m.def("_start_history", &glue::start_history);
  m.def("_stop_history", &glue::stop_history);
  m.def("_snapshot", &glue::snapshot);
  m.def("_attach_oom_observer", [](py::function observer) {
    // Held for the life of the process, as torch.cuda's observers are.
    auto* held = new py::function(std::move(observer));
    for (int device = 0; device < glue::memory().device_count(); ++device) {
      glue::memory().caching(device).on_oom([held](const caching::OomReport& report) {
        py::gil_scoped_acquire acquire;
        try {
          (*held)(report.device, report.requested_bytes, report.total_bytes, report.free_bytes);
        } catch (py::error_already_set& error) {
          error.discard_as_unraisable("mybackend out-of-memory observer");
        }
      });
    }
  });
}

void bind_device(py::module_& m) {
  m.def("_init", [] {
    check_or_throw(Runtime::get().read_environment());
    glue::memory();
  });
  // Python's two answers about torch.cuda: whether its GPUs are free for driver:auto, and, when they
  // are to lend their kernels, the address of its allocator (lender.h).
  m.def("_set_cuda_hooks", [](py::function is_free, py::function lend) {
    // Never destroyed: they may be asked for when the interpreter has gone.
    auto* free = new py::function(std::move(is_free));
    auto* prepare = new py::function(std::move(lend));
    Runtime::get().set_auto_driver([free]() -> std::string {
      if (Py_IsInitialized() == 0) return "sim";
      py::gil_scoped_acquire gil;
      try {
        return (*free)().cast<bool>() ? "cuda" : "sim";
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("mybackend: driver:auto");
        return "sim";
      }
    });
    glue::set_prepare_gpu([prepare] {
      TORCH_CHECK(Py_IsInitialized() != 0, "mybackend: the interpreter has ended");
      py::gil_scoped_acquire gil;
      return reinterpret_cast<c10::Allocator*>((*prepare)().cast<std::uintptr_t>());
    });
  });
  m.def("_is_in_bad_fork", [] { return Runtime::get().is_in_bad_fork(); });
  m.def("_is_initialized", [] { return Runtime::get().memory_if_started() != nullptr; });
  m.def("_register_boxed_kernels", [] {
    py::gil_scoped_release release;
    glue::register_boxed_kernels();
    glue::register_config_hook();
  });
  m.def("_device_count", [] { return Runtime::get().device_count(); });
  m.def("_current_device", [] { return static_cast<int>(glue::current_device()); });
  m.def("_set_device", [](int device) { glue::set_current_device(static_cast<c10::DeviceIndex>(device)); });
  m.def("_exchange_device", [](int device) {
    return static_cast<int>(device < 0 ? glue::current_device() : glue::exchange_device(static_cast<c10::DeviceIndex>(device)));
  });
  m.def("_synchronize", [](int device) {
    py::gil_scoped_release release;
    glue::check_device_index(static_cast<c10::DeviceIndex>(device));
    glue::check(glue::memory().driver().device_synchronize(device));
  });
  m.def("_driver_name", [] { return std::string(glue::memory().driver().name()); });
  m.def("_device_info", [](int device) {
    DeviceInfo info;
    glue::check_device_index(static_cast<c10::DeviceIndex>(device));
    glue::check(glue::memory().driver().device_info(device, &info));
    py::dict d;
    d["name"] = info.name;
    d["total_memory"] = info.total_bytes;
    d["page_size"] = info.page_bytes;
    d["multi_processor_count"] = info.multi_processor_count;
    return d;
  });
  m.def("_seed_default_generators", [](std::int64_t seed) { glue::seed_default_generators(static_cast<std::uint64_t>(seed)); });
  m.def("_default_generator", [](int device) { return glue::default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("_current_stream", [](int device) { return glue::current_stream(static_cast<c10::DeviceIndex>(device)); });
  m.def("_drain_autograd_threads", [] {
    py::gil_scoped_release release;
    glue::drain_autograd_threads();
  });
  m.def("_event_elapsed_ms", [](std::intptr_t start, std::intptr_t end) {
    return glue::event_elapsed_ms(reinterpret_cast<void*>(start), reinterpret_cast<void*>(end));
  });
  m.def(
      "_set_fault",
      [](const std::string& primitive, std::int64_t calls, const std::string& kind, std::int64_t repeat) {
        auto* sim = dynamic_cast<SimDriver*>(&glue::memory().driver());
        if (sim == nullptr) throw py::value_error("faults: only the sim driver scripts them");
        for (int i = 0; i < static_cast<int>(Primitive::kCount); ++i) {
          if (primitive != kPrimitiveNames[i]) continue;
          sim->faults().fail(static_cast<Primitive>(i), calls, kind == "oom" ? StatusCode::kOutOfMemory : StatusCode::kFailed, repeat);
          return;
        }
        throw py::value_error("faults: unknown primitive '" + primitive + "'");
      },
      py::arg("primitive"), py::arg("calls"), py::arg("kind") = "failed", py::arg("repeat") = 1);
  // Queues a task for tests: one that runs until release() is called, or one that throws.
  struct Hold {
    std::shared_ptr<std::promise<void>> gate = std::make_shared<std::promise<void>>();
    bool released = false;
    void release() {
      if (!std::exchange(released, true)) gate->set_value();
    }
    ~Hold() { release(); }
    Hold() = default;
  };
  py::class_<Hold, std::unique_ptr<Hold>>(m, "_Hold").def("release", &Hold::release);
  m.def("_hold_stream", [](const c10::Stream& stream) {
    auto hold = std::make_unique<Hold>();
    std::shared_future<void> opened = hold->gate->get_future().share();
    check_or_throw(
        glue::memory().driver().stream_enqueue(stream.device_index(), glue::to_handle(stream), "hold", [opened] { opened.wait(); }));
    return hold;
  });
  m.def("_throw_on_stream", [](const c10::Stream& stream, const std::string& message) {
    check_or_throw(glue::memory().driver().stream_enqueue(stream.device_index(), glue::to_handle(stream), "throw",
                                                          [message] { throw std::runtime_error(message); }));
  });
  m.def("_clear_faults", [] {
    if (auto* sim = dynamic_cast<SimDriver*>(&glue::memory().driver())) sim->faults().clear();
  });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "mybackend's bindings; use the mybackend package.";
  m.attr("__version__") = mybackend_version();
  m.attr("_built_for_torch") = MYBACKEND_TORCH_VERSION;
  bind_device(m);
  bind_memory(m);
  bind_host_memory(m);
  bind_plans(m);
  bind_storage(m);
  bind_pools(m);
  bind_history(m);
  bind_config(m);
  bind_replay(m);
}
