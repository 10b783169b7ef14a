// Streams, events, stream captures; and what a fork leaves of them.
#include <new>
#include <unordered_set>

#include "driver/cuda/cuda_driver_internal.h"

namespace mybackend {

Status CudaDriver::stream_create(int device, int priority, StreamHandle* out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  int least = 0, greatest = 0;
  MYBACKEND_CALL(stream_priority_range, "", &least, &greatest);
  cuda::StreamPtr stream = nullptr;
  MYBACKEND_CALL(stream_create, "priority=" + std::to_string(priority), &stream, cuda::kStreamNonBlocking,
                 std::clamp(priority, greatest, least));
  *out = reinterpret_cast<std::uintptr_t>(stream);
  return {};
}

Status CudaDriver::take_task_error(StreamHandle stream) {
  std::lock_guard lock(task_errors_->mutex);
  auto found = task_errors_->messages.find(stream);
  if (found == task_errors_->messages.end()) return {};
  Status status(StatusCode::kFailed, std::move(found->second));
  task_errors_->messages.erase(found);
  return status;
}

Status CudaDriver::stream_query(int device, StreamHandle stream) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CALL(stream_query, hex(stream), stream_ptr(stream));
  return take_task_error(stream);
}

Status CudaDriver::stream_synchronize(int device, StreamHandle stream) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CALL(stream_synchronize, hex(stream), stream_ptr(stream));
  return take_task_error(stream);
}

Status CudaDriver::device_synchronize(int device) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CALL(context_synchronize, "");
  return {};
}

Status CudaDriver::stream_enqueue(int device, StreamHandle stream, const char* name, std::function<void()> task) noexcept {
  MYBACKEND_ON_DEVICE(device);
  struct Task {
    std::function<void()> run;
    std::string name;
    StreamHandle stream;
    std::shared_ptr<TaskErrors> errors;
  };
  auto owned = std::make_unique<Task>(Task{std::move(task), name, stream, task_errors_});
  const auto run = [](void* data) {
    std::unique_ptr<Task> t(static_cast<Task*>(data));
    std::string message;
    try {
      return t->run();
    } catch (const std::exception& error) {
      message = error.what();
    } catch (...) {
      message = "an exception that is not a std::exception";
    }
    std::lock_guard lock(t->errors->mutex);
    t->errors->messages.try_emplace(t->stream, t->name + ": " + message);
  };
  MYBACKEND_CALL(launch_host_function, hex(stream) + ", " + name, stream_ptr(stream), run, owned.get());
  (void)owned.release();
  return {};
}

Status CudaDriver::copy_async(int device, StreamHandle stream, void* dst, const void* src, std::size_t bytes) noexcept {
  MYBACKEND_ON_DEVICE(device);
  if (bytes == 0) return {};
  MYBACKEND_CALL(memory_copy_async, hex(dst) + ", " + hex(src) + ", bytes=" + std::to_string(bytes) + ", stream=" + hex(stream),
                 reinterpret_cast<std::uintptr_t>(dst), reinterpret_cast<std::uintptr_t>(src), bytes, stream_ptr(stream));
  return {};
}

// --- Events -----------------------------------------------------------------------------------

Status CudaDriver::event_create(int device, EventHandle* out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  cuda::EventPtr event = nullptr;
  MYBACKEND_CALL(event_create, "", &event, cuda::kEventDefault);
  *out = reinterpret_cast<std::uintptr_t>(event);
  std::lock_guard lock(events_mutex_);
  events_[*out] = device;
  return {};
}

// Whether the event is one of ours: a pointer that is not would take the process down.
#define MYBACKEND_CHECK_EVENT(event)                                                                     \
  {                                                                                                      \
    std::lock_guard lock(events_mutex_);                                                                 \
    if (events_.count(event) == 0) return {StatusCode::kInvalidArgument, "unknown event " + hex(event)}; \
  }

void CudaDriver::event_destroy(int device, EventHandle event) noexcept {
  {
    std::lock_guard lock(events_mutex_);
    if (events_.erase(event) == 0) return;
  }
  if (!check_device(device).ok()) return;
  OnDevice on_device(*this, device);
  if (on_device.ok()) (void)api_.event_destroy(event_ptr(event));
}

Status CudaDriver::event_record(int device, EventHandle event, StreamHandle stream) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CHECK_EVENT(event);
  MYBACKEND_CALL(event_record, hex(event) + ", stream=" + hex(stream), event_ptr(event), stream_ptr(stream));
  return {};
}

Status CudaDriver::event_query(int device, EventHandle event) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CHECK_EVENT(event);
  MYBACKEND_CALL(event_query, hex(event), event_ptr(event));
  return {};
}

Status CudaDriver::event_synchronize(int device, EventHandle event) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CHECK_EVENT(event);
  MYBACKEND_CALL(event_synchronize, hex(event), event_ptr(event));
  return {};
}

Status CudaDriver::stream_wait_event(int device, StreamHandle stream, EventHandle event) noexcept {
  MYBACKEND_ON_DEVICE(device);
  MYBACKEND_CHECK_EVENT(event);
  MYBACKEND_CALL(stream_wait_event, hex(stream) + ", event=" + hex(event), stream_ptr(stream), event_ptr(event), 0);
  return {};
}

Status CudaDriver::event_elapsed_ns(EventHandle start, EventHandle end, std::int64_t* out) noexcept {
  MYBACKEND_CHECK_EVENT(start);
  MYBACKEND_CHECK_EVENT(end);
  constexpr int device = -1;
  float ms = 0;
  MYBACKEND_CALL(event_elapsed_ms, hex(start) + ", " + hex(end), &ms, event_ptr(start), event_ptr(end));
  *out = static_cast<std::int64_t>(static_cast<double>(ms) * 1e6);
  return {};
}

// The child may still ask whose memory something is.

// --- Stream captures --------------------------------------------------------------------------

Status CudaDriver::capture_mark(int device, StreamHandle stream, CaptureMarker* out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  const std::string name = "stream=" + hex(stream);
  int status = cuda::kCaptureNone;
  cuda::GraphPtr graph = nullptr;
  const cuda::NodePtr* frontier = nullptr;
  std::size_t count = 0;
  MYBACKEND_CALL(stream_capture_info, name, stream_ptr(stream), &status, nullptr, &graph, &frontier, &count);
  if (status != cuda::kCaptureActive) return {StatusCode::kNotReady, ""};
  cuda::NodePtr node = nullptr;
  MYBACKEND_CALL(graph_add_empty_node, name, &node, graph, frontier, count);
  MYBACKEND_CALL(stream_update_capture, name, stream_ptr(stream), &node, 1, cuda::kSetDependencies);
  *out = reinterpret_cast<std::uintptr_t>(node);
  return {};
}

Status CudaDriver::capture_passed(int device, StreamHandle stream, const std::vector<CaptureMarker>& markers,
                                  std::vector<bool>* out) noexcept {
  MYBACKEND_ON_DEVICE(device);
  int status = cuda::kCaptureNone;
  const cuda::NodePtr* frontier = nullptr;
  std::size_t count = 0;
  MYBACKEND_CALL(stream_capture_info, "stream=" + hex(stream), stream_ptr(stream), &status, nullptr, nullptr, &frontier, &count);
  if (status != cuda::kCaptureActive) return {StatusCode::kNotReady, ""};
  // What the frontier depends on, until all markers are found.
  std::unordered_set<CaptureMarker> wanted(markers.begin(), markers.end()), found;
  std::unordered_set<cuda::NodePtr> seen;
  std::vector<cuda::NodePtr> open(frontier, frontier + count);
  while (!open.empty() && found.size() < wanted.size()) {
    const cuda::NodePtr node = open.back();
    open.pop_back();
    if (!seen.insert(node).second) continue;
    if (const auto marker = static_cast<CaptureMarker>(reinterpret_cast<std::uintptr_t>(node)); wanted.count(marker) != 0)
      found.insert(marker);
    std::size_t dependency_count = 0;
    MYBACKEND_CALL(graph_node_dependencies, hex(node), node, nullptr, &dependency_count);
    if (dependency_count == 0) continue;
    const std::size_t old = open.size();
    open.resize(old + dependency_count);
    MYBACKEND_CALL(graph_node_dependencies, hex(node), node, open.data() + old, &dependency_count);
    open.resize(old + dependency_count);
  }
  out->clear();
  for (CaptureMarker marker : markers) out->push_back(found.count(marker) != 0);
  return {};
}

Status CudaDriver::prepare_fork() noexcept {
  ranges_mutex_.lock();
  events_mutex_.lock();
  return {StatusCode::kNotSupported, "a child process cannot use its parent's GPU state"};
}

void CudaDriver::after_fork_in_parent() noexcept {
  events_mutex_.unlock();
  ranges_mutex_.unlock();
}

void CudaDriver::after_fork_in_child() noexcept {
  events_mutex_.unlock();
  // It knows its writer by a thread number, which is another one here: it cannot be unlocked.
  new (&ranges_mutex_) std::shared_mutex();
}

#undef MYBACKEND_CHECK_EVENT

}  // namespace mybackend
