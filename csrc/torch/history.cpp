#include "torch/history.h"

#include <torch/csrc/profiler/combined_traceback.h>

#include <cstdlib>
#include <unordered_map>

#include "torch/context.h"

// Declared in torch/csrc/profiler/python/combined_traceback.h, which includes a header that torch
// does not ship.
namespace torch {
TORCH_API std::vector<pybind11::object> py_symbolize(std::vector<CapturedTraceback*>& to_symbolize);
void freeDeadCapturedTracebackFrames();
}  // namespace torch

namespace py = pybind11;

namespace mybackend::glue {
namespace {

using torch::CapturedTraceback;

caching::Context capture_python() {
  return CapturedTraceback::gather(/*python=*/true, /*script=*/true, /*cpp=*/false);
}
caching::Context capture_all() {
  return CapturedTraceback::gather(/*python=*/true, /*script=*/true, /*cpp=*/true);
}

// Turns stacks into lists of frames, all of them at once, each one once.
class Frames {
 public:
  void add(const caching::Context& context) {
    if (context == nullptr) return;
    auto* traceback = static_cast<CapturedTraceback*>(context.get());
    if (index_.try_emplace(traceback, tracebacks_.size()).second) tracebacks_.push_back(traceback);
  }
  void symbolize() {
    if (!tracebacks_.empty()) frames_ = torch::py_symbolize(tracebacks_);
  }
  py::object of(const caching::Context& context) const {
    if (context == nullptr) return py::list();
    return frames_.at(index_.at(static_cast<CapturedTraceback*>(context.get())));
  }

 private:
  std::vector<CapturedTraceback*> tracebacks_;
  std::unordered_map<CapturedTraceback*, std::size_t> index_;
  std::vector<py::object> frames_;
};

py::tuple pool_tuple(caching::PoolId id) {
  return py::make_tuple(id.first, id.second);
}

py::dict segment_dict(const caching::SegmentInfo& segment, const Frames& frames) {
  py::dict s;
  s["device"] = segment.device;
  s["address"] = segment.address;
  s["total_size"] = segment.total_bytes;
  s["allocated_size"] = segment.allocated_bytes;
  s["active_size"] = segment.active_bytes;
  s["requested_size"] = segment.requested_bytes;
  s["stream"] = segment.stream;
  s["segment_type"] = segment.is_large ? "large" : "small";
  s["segment_pool_id"] = pool_tuple(segment.pool_id);
  s["is_expandable"] = segment.is_expandable;
  s["frames"] = frames.of(segment.context);
  py::list blocks;
  for (const caching::BlockInfo& block : segment.blocks) {
    py::dict b;
    b["address"] = block.address;
    b["size"] = block.bytes;
    b["requested_size"] = block.requested_bytes;
    b["state"] = block.allocated ? "active_allocated" : block.active ? "active_pending_free" : "inactive";
    b["frames"] = frames.of(block.context);
    blocks.append(b);
  }
  s["blocks"] = blocks;
  return s;
}

py::dict entry_dict(const caching::TraceEntry& entry, const Frames& frames) {
  py::dict e;
  e["action"] = caching::kActionNames[static_cast<int>(entry.action)];
  e[entry.action == caching::Action::kOom ? "device_free" : "addr"] = entry.address;
  e["size"] = entry.bytes;
  e["stream"] = entry.stream;
  e["time_us"] = entry.time_us;
  e["pool_id"] = pool_tuple(entry.pool_id);
  e["compile_context"] = "N/A";
  e["user_metadata"] = "";
  e["thread"] = entry.thread;
  if (entry.note != nullptr) e["note"] = *entry.note;
  e["frames"] = frames.of(entry.context);
  return e;
}

py::dict settings_dict() {
  const Settings s = Runtime::get().config().settings();
  const auto mb = [](std::size_t bytes) { return bytes == kUnlimitedBytes ? py::object(py::int_(-1)) : py::object(py::int_(bytes)); };
  py::dict d;
  const char* variable = config_variable_in_force();
  d["PYTORCH_CUDA_ALLOC_CONF"] = variable != nullptr ? std::getenv(variable) : "";
  d["max_split_size"] = mb(s.max_split_size_mb);
  d["garbage_collection_threshold"] = s.garbage_collection_threshold;
  d["expandable_segments"] = s.expandable_segments;
  d["pinned_num_register_threads"] = s.pinned_num_register_threads;
  d["release_lock_on_cudamalloc"] = s.release_lock_on_cudamalloc;
  d["pinned_use_cuda_host_register"] = s.pinned_use_cuda_host_register;
  d["large_segment_size"] = mb(s.large_segment_size_mb);
  d["per_process_memory_fraction"] = s.per_process_memory_fraction;
  py::dict divisions;
  for (std::size_t i = 0; i < s.roundup_power2_divisions.size(); ++i) {
    divisions[py::str(std::to_string(std::size_t{1} << i))] = s.roundup_power2_divisions[i];
  }
  d["roundup_power2_divisions"] = divisions;
  return d;
}

}  // namespace

void start_history(std::size_t max_entries, const std::string& when, bool all_stacks, bool clear_old,
                   const std::vector<std::string>& skipped) {
  caching::HistoryOptions options;
  options.max_entries = max_entries;
  using caching::RecordContext;
  options.when = when == "all"     ? RecordContext::kAll
                 : when == "alloc" ? RecordContext::kAlloc
                 : when == "state" ? RecordContext::kState
                                   : RecordContext::kNever;
  options.capture = all_stacks ? &capture_all : &capture_python;
  for (const std::string& name : skipped) {
    bool known = false;
    for (int action = 0; action < static_cast<int>(std::size(caching::kActionNames)); ++action) {
      if (name != caching::kActionNames[action]) continue;
      options.skipped |= std::uint32_t{1} << action;
      known = true;
    }
    if (!known) throw py::value_error("skip_actions: unknown action '" + name + "'");
  }
  memory().start_history(options, clear_old);
}

void stop_history() {
  memory().stop_history();
}

py::dict snapshot(bool with_traces) {
  const int device_count = memory().device_count();
  std::vector<caching::SegmentInfo> segments;
  std::vector<std::vector<caching::TraceEntry>> traces(static_cast<std::size_t>(device_count));
  {
    py::gil_scoped_release release;  // the allocator may be waiting for the interpreter elsewhere
    for (int device = 0; device < device_count; ++device) {
      // First the history: the event of this snapshot belongs to the next one's, as in PyTorch.
      if (with_traces) traces[static_cast<std::size_t>(device)] = memory().history(device);
      memory().for_each_caching(device, [&](caching::CachingAllocator& allocator) {
        for (caching::SegmentInfo& segment : allocator.snapshot(with_traces)) segments.push_back(std::move(segment));
      });
    }
  }
  Frames frames;
  for (const auto& segment : segments) {
    frames.add(segment.context);
    for (const auto& block : segment.blocks) frames.add(block.context);
  }
  for (const auto& trace : traces) {
    for (const auto& entry : trace) frames.add(entry.context);
  }
  frames.symbolize();
  py::list segment_list, trace_list, own_list;
  for (const auto& segment : segments) segment_list.append(segment_dict(segment, frames));
  for (const auto& trace : traces) {
    py::list entries, own;
    for (const auto& entry : trace) {
      if (caching::is_own_action(entry.action)) {
        // Viewers of PyTorch's format stop at actions that they do not know: ours stand beside,
        // and tell where in the trace they belong.
        py::dict e = entry_dict(entry, frames);
        e["before"] = py::len(entries);
        own.append(e);
      } else {
        entries.append(entry_dict(entry, frames));
      }
    }
    trace_list.append(entries);
    own_list.append(own);
  }
  py::dict result;
  result["segments"] = segment_list;
  result["device_traces"] = trace_list;
  result["mybackend_events"] = own_list;
  result["allocator_settings"] = settings_dict();
  result["external_annotations"] = py::list();
  torch::freeDeadCapturedTracebackFrames();
  return result;
}

}  // namespace mybackend::glue
