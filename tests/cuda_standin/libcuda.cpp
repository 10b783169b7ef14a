// A stand-in for libcuda.so.1 on a machine without a GPU: the calls of cuda_api.h over host
// memory, so that copies and fills really happen, with the preconditions of the real library
// checked (a call without a current context fails, an unmapped handle cannot be unmapped, …).
//
//   addresses   cuMemAlloc gives ever-increasing ones from 0x700000000000, reservations start at
//               0x600000000000; both aligned to 2 MiB, never reused. So two runs of one program
//               see the same addresses
//   streams     work is done at once. Events complete at once too, or, with
//               MYBACKEND_STANDIN_LAZY=1, when their stream is advanced or synchronized
//   devices     MYBACKEND_STANDIN_DEVICES (default 2), each of MYBACKEND_STANDIN_CAPACITY bytes
//               (default 8 GiB), counted in 2 MiB steps
//   processes   with MYBACKEND_STANDIN_SHARED=1 another process can open memory by its handle
//   control     the standin_* functions at the end: faults by symbol, call counts, a context that
//               goes away, a capture underway
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "driver/cuda/cuda_api.h"

using namespace mybackend::cuda;

namespace {

constexpr std::size_t kPage = std::size_t{2} << 20;
constexpr Result kInvalidDevice = 101, kInvalidHandle = 400, kCaptureUnsupported = 900, kAlreadyRegistered = 712, kNotRegistered = 713;
constexpr int kMaxDevices = 8;

std::size_t number_from(const char* variable, std::size_t initial) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : initial;
}
std::size_t pages(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

struct Stream {
  std::uint64_t issued = 0, done = 0;
};
struct Event {
  StreamPtr stream = nullptr;
  std::uint64_t at = 0;
  double recorded_ms = 0;
  bool captured = false;
  std::vector<NodePtr> nodes;  // what it stands behind in a capture
};
struct Physical {
  std::size_t bytes;
  int device, fd;
  bool exportable = false, imported = false;
};
struct Mapping {
  std::size_t bytes;
  MemoryHandle handle;
  std::set<int> accessors;
};
struct Fault {
  std::int64_t countdown;
  Result result;
};

struct State {
  std::mutex mutex;
  const int device_count = static_cast<int>(std::min<std::size_t>(number_from("MYBACKEND_STANDIN_DEVICES", 2), kMaxDevices));
  const std::size_t capacity = number_from("MYBACKEND_STANDIN_CAPACITY", std::size_t{8} << 30);
  const bool lazy = number_from("MYBACKEND_STANDIN_LAZY", 0) != 0;
  const bool shared = number_from("MYBACKEND_STANDIN_SHARED", 0) != 0;
  std::map<std::uintptr_t, int> files;  // of allocations, when shared
  bool initialized = false, gone = false, capturing = false;
  std::size_t used[kMaxDevices] = {};
  std::uintptr_t next_address = 0x700000000000, next_range = 0x600000000000;
  std::map<std::uintptr_t, std::pair<std::size_t, int>> allocations;  // bytes, device
  std::map<std::uintptr_t, std::size_t> ranges;
  std::map<std::uintptr_t, Mapping> mappings;
  std::map<MemoryHandle, Physical> physical;
  MemoryHandle next_handle = 1;
  std::map<StreamPtr, std::vector<NodePtr>> captures;  // streams under capture: what their next work depends on
  std::map<NodePtr, std::vector<NodePtr>> graph;       // nodes and what they depend on
  std::map<std::uintptr_t, std::size_t> registered;    // host memory
  std::unordered_map<StreamPtr, Stream> streams;       // made at first use: also foreign ones
  std::uintptr_t next_stream = 0x100;
  std::unordered_map<EventPtr, Event> events;
  std::uintptr_t next_event = 0x10000;
  double clock_ms = 0;
  std::map<std::string, std::int64_t> calls;
  std::map<std::string, Fault> faults;
};
State& state() {
  static State* s = new State;
  return *s;
}

// Contexts are numbers: device + 1.
thread_local std::vector<std::uintptr_t> t_contexts;
thread_local int t_capture_mode = 0;  // 0: global

int current_device() {
  return t_contexts.empty() || t_contexts.back() == 0 ? -1 : static_cast<int>(t_contexts.back()) - 1;
}

Result enter(State& s, const char* symbol) {
  ++s.calls[symbol];
  if (s.gone) return kDeinitialized;
  auto fault = s.faults.find(symbol);
  if (fault != s.faults.end() && fault->second.countdown > 0 && --fault->second.countdown == 0) return fault->second.result;
  return kSuccess;
}

#define ENTER(symbol)                        \
  State& s = state();                        \
  std::lock_guard<std::mutex> lock(s.mutex); \
  if (Result entered = enter(s, #symbol)) return entered
#define NEED_CONTEXT() \
  if (current_device() < 0) return kInvalidContext
#define NEED_NO_CAPTURE() \
  if (s.capturing && t_capture_mode != kCaptureRelaxed) return kCaptureUnsupported

void complete(State& s, StreamPtr stream) {
  Stream& st = s.streams[stream];
  st.done = st.issued;
}

}  // namespace

extern "C" {

Result cuInit(unsigned) {
  ENTER(cuInit);
  s.initialized = true;
  return s.device_count > 0 ? kSuccess : kNoDevice;
}
Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
Result cuGetErrorName(Result result, const char** name) {
  switch (result) {
    case kSuccess: *name = "CUDA_SUCCESS"; break;
    case kInvalidValue: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case kNoMemory: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case kDeinitialized: *name = "CUDA_ERROR_DEINITIALIZED"; break;
    case kNoDevice: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case kInvalidContext: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case kInvalidHandle: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
    case kNotReadyResult: *name = "CUDA_ERROR_NOT_READY"; break;
    case kCaptureUnsupported: *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; break;
    default: *name = nullptr; return kInvalidValue;
  }
  return kSuccess;
}
Result cuGetErrorString(Result result, const char** text) {
  *text = result == kNoMemory ? "out of memory" : "stand-in";
  return kSuccess;
}
Result cuDeviceGetCount(int* count) {
  ENTER(cuDeviceGetCount);
  *count = s.device_count;
  return kSuccess;
}
Result cuDeviceGet(DeviceOrdinal* device, int index) {
  ENTER(cuDeviceGet);
  if (index < 0 || index >= s.device_count) return kInvalidDevice;
  *device = index;
  return kSuccess;
}
Result cuDeviceGetName(char* name, int bytes, DeviceOrdinal) {
  ENTER(cuDeviceGetName);
  std::snprintf(name, static_cast<std::size_t>(bytes), "stand-in");
  return kSuccess;
}
Result cuDeviceGetAttribute(int* value, int attribute, DeviceOrdinal) {
  ENTER(cuDeviceGetAttribute);
  *value = attribute == kMultiprocessorCount ? 4 : attribute == kVirtualMemorySupported || attribute == kPosixHandlesSupported ? 1 : 0;
  return kSuccess;
}
Result cuDeviceTotalMem_v2(std::size_t* bytes, DeviceOrdinal) {
  ENTER(cuDeviceTotalMem_v2);
  *bytes = s.capacity;
  return kSuccess;
}

// --- Contexts ---
Result cuDevicePrimaryCtxRetain(ContextPtr* context, DeviceOrdinal device) {
  ENTER(cuDevicePrimaryCtxRetain);
  if (!s.initialized) return 3;
  *context = reinterpret_cast<ContextPtr>(static_cast<std::uintptr_t>(device) + 1);
  return kSuccess;
}
Result cuDevicePrimaryCtxRelease_v2(DeviceOrdinal) {
  return kSuccess;
}
Result cuDevicePrimaryCtxGetState(DeviceOrdinal, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return kSuccess;
}
Result cuCtxGetCurrent(ContextPtr* context) {
  ENTER(cuCtxGetCurrent);
  *context = t_contexts.empty() ? nullptr : reinterpret_cast<ContextPtr>(t_contexts.back());
  return kSuccess;
}
Result cuCtxSetCurrent(ContextPtr context) {
  ENTER(cuCtxSetCurrent);
  if (t_contexts.empty()) t_contexts.push_back(0);
  t_contexts.back() = reinterpret_cast<std::uintptr_t>(context);
  return kSuccess;
}
Result cuCtxPushCurrent_v2(ContextPtr context) {
  ENTER(cuCtxPushCurrent_v2);
  t_contexts.push_back(reinterpret_cast<std::uintptr_t>(context));
  return kSuccess;
}
Result cuCtxPopCurrent_v2(ContextPtr* context) {
  if (t_contexts.empty()) return kInvalidContext;
  *context = reinterpret_cast<ContextPtr>(t_contexts.back());
  t_contexts.pop_back();
  return kSuccess;
}
Result cuCtxSynchronize() {
  ENTER(cuCtxSynchronize);
  NEED_CONTEXT();
  for (auto& [stream, st] : s.streams) st.done = st.issued;
  return kSuccess;
}
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kSuccess;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, t_capture_mode);
  return kSuccess;
}

// --- Memory ---
Result cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total_bytes) {
  ENTER(cuMemGetInfo_v2);
  NEED_CONTEXT();
  *total_bytes = s.capacity;
  *free_bytes = s.capacity - s.used[current_device()];
  return kSuccess;
}
Result cuMemAlloc_v2(DevicePtr* out, std::size_t bytes) {
  ENTER(cuMemAlloc_v2);
  NEED_CONTEXT();
  NEED_NO_CAPTURE();
  const int device = current_device();
  if (bytes == 0) return kInvalidValue;
  if (bytes > s.capacity || s.used[device] + pages(bytes) > s.capacity) return kNoMemory;
  int fd = -1;
  if (s.shared && ((fd = memfd_create("standin", MFD_CLOEXEC)) < 0 || ftruncate(fd, static_cast<off_t>(pages(bytes))) != 0))
    return kNoMemory;
  void* ptr = mmap(reinterpret_cast<void*>(s.next_address), pages(bytes), PROT_READ | PROT_WRITE,
                   (s.shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | MAP_NORESERVE | MAP_FIXED_NOREPLACE, fd, 0);
  if (ptr == MAP_FAILED) return kNoMemory;
  if (s.shared) s.files[s.next_address] = fd;
  s.allocations[s.next_address] = {pages(bytes), device};
  *out = s.next_address;
  s.next_address += pages(bytes);
  s.used[device] += pages(bytes);
  return kSuccess;
}
Result cuMemFree_v2(DevicePtr ptr) {
  ENTER(cuMemFree_v2);
  NEED_CONTEXT();
  NEED_NO_CAPTURE();
  auto found = s.allocations.find(ptr);
  if (found == s.allocations.end()) return kInvalidValue;
  munmap(reinterpret_cast<void*>(ptr), found->second.first);
  if (s.shared) close(s.files.extract(ptr).mapped());
  s.used[found->second.second] -= found->second.first;
  s.allocations.erase(found);
  return kSuccess;
}
Result cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProperties*, int) {
  *bytes = kPage;
  return kSuccess;
}
Result cuMemAddressReserve(DevicePtr* out, std::size_t bytes, std::size_t, DevicePtr, unsigned long long) {
  ENTER(cuMemAddressReserve);
  NEED_CONTEXT();
  if (bytes == 0 || bytes % kPage != 0) return kInvalidValue;
  void* ptr = mmap(reinterpret_cast<void*>(s.next_range), bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (ptr == MAP_FAILED) return kNoMemory;
  s.ranges[s.next_range] = bytes;
  *out = s.next_range;
  s.next_range += bytes;
  return kSuccess;
}
Result cuMemAddressFree(DevicePtr ptr, std::size_t bytes) {
  ENTER(cuMemAddressFree);
  auto found = s.ranges.find(ptr);
  if (found == s.ranges.end() || found->second != bytes) return kInvalidValue;
  const auto mapped = s.mappings.lower_bound(ptr);
  if (mapped != s.mappings.end() && mapped->first < ptr + bytes) return kInvalidValue;
  munmap(reinterpret_cast<void*>(ptr), bytes);
  s.ranges.erase(found);
  return kSuccess;
}
Result cuMemCreate(MemoryHandle* out, std::size_t bytes, const AllocationProperties* properties, unsigned long long) {
  ENTER(cuMemCreate);
  const int device = properties->location.id;
  if (bytes == 0 || bytes % kPage != 0 || device < 0 || device >= s.device_count) return kInvalidValue;
  if (s.used[device] + bytes > s.capacity) return kNoMemory;
  const int fd = memfd_create("standin", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kNoMemory;
  s.used[device] += bytes;
  s.physical[s.next_handle] = {bytes, device, fd, properties->requested_handle_types == kPosixFileDescriptor};
  *out = s.next_handle++;
  return kSuccess;
}
Result cuMemRelease(MemoryHandle handle) {
  ENTER(cuMemRelease);
  auto found = s.physical.find(handle);
  if (found == s.physical.end()) return kInvalidValue;
  for (const auto& [address, mapping] : s.mappings) {
    if (mapping.handle == handle) return kInvalidValue;
  }
  close(found->second.fd);
  if (!found->second.imported) s.used[found->second.device] -= found->second.bytes;
  s.physical.erase(found);
  return kSuccess;
}
Result cuMemExportToShareableHandle(void* out, MemoryHandle handle, int type, unsigned long long) {
  ENTER(cuMemExportToShareableHandle);
  auto found = s.physical.find(handle);
  if (found == s.physical.end() || type != kPosixFileDescriptor || !found->second.exportable) return kInvalidValue;
  *static_cast<int*>(out) = fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
  return kSuccess;
}
Result cuMemImportFromShareableHandle(MemoryHandle* out, void* os_handle, int type) {
  ENTER(cuMemImportFromShareableHandle);
  NEED_CONTEXT();
  const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle));
  struct stat file;
  if (type != kPosixFileDescriptor || fstat(fd, &file) != 0) return kInvalidValue;
  s.physical[s.next_handle] = {static_cast<std::size_t>(file.st_size), current_device(), fcntl(fd, F_DUPFD_CLOEXEC, 0), true, true};
  *out = s.next_handle++;
  return kSuccess;
}
Result cuMemMap(DevicePtr ptr, std::size_t bytes, std::size_t offset, MemoryHandle handle, unsigned long long) {
  ENTER(cuMemMap);
  auto found = s.physical.find(handle);
  if (found == s.physical.end() || offset != 0 || bytes != found->second.bytes || s.mappings.count(ptr) != 0) return kInvalidValue;
  auto range = s.ranges.upper_bound(ptr);
  if (range == s.ranges.begin() || ptr + bytes > (--range)->first + range->second) return kInvalidValue;
  s.mappings[ptr] = {bytes, handle, {}};  // memory without access, as in CUDA
  return kSuccess;
}
// Of a range of whole mappings.
Result cuMemSetAccess(DevicePtr ptr, std::size_t bytes, const AccessDescription* access, std::size_t count) {
  ENTER(cuMemSetAccess);
  if (count != 1 || access->flags != 3 || access->location.id < 0 || access->location.id >= s.device_count) return kInvalidValue;
  for (DevicePtr at = ptr; at < ptr + bytes;) {
    auto found = s.mappings.find(at);
    if (found == s.mappings.end() || at + found->second.bytes > ptr + bytes) return kInvalidValue;
    void* mapped = mmap(reinterpret_cast<void*>(at), found->second.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                        s.physical.at(found->second.handle).fd, 0);
    if (mapped == MAP_FAILED) return kNoMemory;
    found->second.accessors.insert(access->location.id);
    at += found->second.bytes;
  }
  return kSuccess;
}
Result cuMemUnmap(DevicePtr ptr, std::size_t bytes) {
  ENTER(cuMemUnmap);
  auto found = s.mappings.find(ptr);
  if (found == s.mappings.end() || found->second.bytes != bytes) return kInvalidValue;
  mmap(reinterpret_cast<void*>(ptr), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  s.mappings.erase(found);
  return kSuccess;
}
Result cuMemcpyAsync(DevicePtr dst, DevicePtr src, std::size_t bytes, StreamPtr) {
  {
    ENTER(cuMemcpyAsync);
    NEED_CONTEXT();
  }
  std::memmove(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
  return kSuccess;
}
Result cuMemHostAlloc(void** out, std::size_t bytes, unsigned) {
  ENTER(cuMemHostAlloc);
  NEED_CONTEXT();
  *out = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *out != nullptr ? kSuccess : kNoMemory;
}
Result cuMemFreeHost(void* ptr) {
  std::free(ptr);
  return kSuccess;
}
Result cuMemHostRegister_v2(void* ptr, std::size_t bytes, unsigned) {
  ENTER(cuMemHostRegister_v2);
  NEED_CONTEXT();
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  const auto after = s.registered.lower_bound(address + bytes);
  if (after != s.registered.begin() && std::prev(after)->first + std::prev(after)->second > address) return kAlreadyRegistered;
  s.registered[address] = bytes;
  return kSuccess;
}
Result cuMemHostUnregister(void* ptr) {
  ENTER(cuMemHostUnregister);
  NEED_CONTEXT();
  return s.registered.erase(reinterpret_cast<std::uintptr_t>(ptr)) != 0 ? kSuccess : kNotRegistered;
}

// --- Streams and events ---
Result cuStreamCreateWithPriority(StreamPtr* out, unsigned, int) {
  ENTER(cuStreamCreateWithPriority);
  NEED_CONTEXT();
  *out = reinterpret_cast<StreamPtr>(s.next_stream += 0x10);
  return kSuccess;
}
Result cuStreamQuery(StreamPtr stream) {
  ENTER(cuStreamQuery);
  NEED_CONTEXT();
  const Stream& st = s.streams[stream];
  return !s.lazy || st.done == st.issued ? kSuccess : kNotReadyResult;
}
Result cuStreamSynchronize(StreamPtr stream) {
  ENTER(cuStreamSynchronize);
  NEED_CONTEXT();
  complete(s, stream);
  return kSuccess;
}
Result cuStreamWaitEvent(StreamPtr stream, EventPtr event, unsigned) {
  ENTER(cuStreamWaitEvent);
  NEED_CONTEXT();
  const auto found = s.events.find(event);
  if (found == s.events.end()) return kInvalidHandle;
  if (found->second.captured) {  // the stream joins the capture
    std::vector<NodePtr>& frontier = s.captures[stream];
    frontier.insert(frontier.end(), found->second.nodes.begin(), found->second.nodes.end());
  }
  return kSuccess;
}
Result cuStreamGetCaptureInfo_v2(StreamPtr stream, int* status, std::uint64_t* id, GraphPtr* graph, const NodePtr** nodes,
                                 std::size_t* count) {
  ENTER(cuStreamGetCaptureInfo_v2);
  NEED_CONTEXT();
  const auto found = s.captures.find(stream);
  *status = found != s.captures.end() ? kCaptureActive : kCaptureNone;
  if (found == s.captures.end()) return kSuccess;
  if (id != nullptr) *id = 1;
  if (graph != nullptr) *graph = &s.graph;
  *nodes = found->second.data();
  *count = found->second.size();
  return kSuccess;
}
Result cuGraphAddEmptyNode(NodePtr* out, GraphPtr graph, const NodePtr* nodes, std::size_t count) {
  ENTER(cuGraphAddEmptyNode);
  if (graph != &s.graph) return kInvalidHandle;
  *out = reinterpret_cast<NodePtr>(0x9000 + 0x10 * s.graph.size());
  s.graph[*out] = {nodes, nodes + count};
  return kSuccess;
}
Result cuStreamUpdateCaptureDependencies(StreamPtr stream, NodePtr* nodes, std::size_t count, unsigned flags) {
  ENTER(cuStreamUpdateCaptureDependencies);
  const auto found = s.captures.find(stream);
  if (found == s.captures.end() || flags != kSetDependencies) return kInvalidValue;
  found->second.assign(nodes, nodes + count);
  return kSuccess;
}
Result cuGraphNodeGetDependencies(NodePtr node, NodePtr* nodes, std::size_t* count) {
  ENTER(cuGraphNodeGetDependencies);
  const auto found = s.graph.find(node);
  if (found == s.graph.end()) return kInvalidValue;
  if (nodes != nullptr) std::copy_n(found->second.begin(), std::min(*count, found->second.size()), nodes);
  *count = found->second.size();
  return kSuccess;
}
Result cuLaunchHostFunc(StreamPtr, HostFunction function, void* data) {
  {
    ENTER(cuLaunchHostFunc);
    NEED_CONTEXT();
  }
  function(data);
  return kSuccess;
}
Result cuEventCreate(EventPtr* out, unsigned) {
  ENTER(cuEventCreate);
  NEED_CONTEXT();
  *out = reinterpret_cast<EventPtr>(s.next_event += 0x10);
  s.events[*out] = {};
  return kSuccess;
}
Result cuEventDestroy_v2(EventPtr event) {
  ENTER(cuEventDestroy_v2);
  return s.events.erase(event) != 0 ? kSuccess : kInvalidHandle;
}
Result cuEventRecord(EventPtr event, StreamPtr stream) {
  ENTER(cuEventRecord);
  NEED_CONTEXT();
  auto found = s.events.find(event);
  if (found == s.events.end()) return kInvalidHandle;
  found->second = {stream, ++s.streams[stream].issued, s.clock_ms += 1, false, {}};
  if (const auto capture = s.captures.find(stream); capture != s.captures.end()) {
    found->second.captured = true;
    found->second.nodes = capture->second;
  }
  return kSuccess;
}
Result cuEventQuery(EventPtr event) {
  ENTER(cuEventQuery);
  NEED_CONTEXT();
  auto found = s.events.find(event);
  if (found == s.events.end()) return kInvalidHandle;
  return !s.lazy || found->second.at <= s.streams[found->second.stream].done ? kSuccess : kNotReadyResult;
}
Result cuEventSynchronize(EventPtr event) {
  ENTER(cuEventSynchronize);
  NEED_CONTEXT();
  auto found = s.events.find(event);
  if (found == s.events.end()) return kInvalidHandle;
  Stream& st = s.streams[found->second.stream];
  st.done = std::max(st.done, found->second.at);
  return kSuccess;
}
Result cuEventElapsedTime(float* ms, EventPtr start, EventPtr end) {
  ENTER(cuEventElapsedTime);
  auto a = s.events.find(start), b = s.events.find(end);
  if (a == s.events.end() || b == s.events.end()) return kInvalidHandle;
  *ms = static_cast<float>(b->second.recorded_ms - a->second.recorded_ms);
  return kSuccess;
}

// --- Control ---
// The n-th call of `symbol` from now gives `result` (and only that one); n = 0 takes it back.
void standin_fail(const char* symbol, std::int64_t n, Result result) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.faults[symbol] = {n, result};
}
std::int64_t standin_calls(const char* symbol) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.calls[symbol];
}
void standin_advance(StreamPtr stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  complete(s, stream);
}
std::size_t standin_used_bytes(int device) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.used[device];
}
// The file behind an allocation, or -1.
int standin_file(void* ptr, std::size_t* bytes) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto found = s.files.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (found == s.files.end()) return -1;
  *bytes = s.allocations.at(found->first).first;
  return found->second;
}
// How many devices may use the mapped memory that ptr lies in.
int standin_accessor_count(void* ptr) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto found = s.mappings.upper_bound(reinterpret_cast<std::uintptr_t>(ptr));
  return found != s.mappings.begin() ? static_cast<int>((--found)->second.accessors.size()) : 0;
}
std::size_t standin_live_events() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.events.size();
}
// From now on (or not any more) each call says that the library was shut down.
void standin_set_gone(int gone) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.gone = gone != 0;
}
// A stream capture in global mode is underway (or not any more).
// A capture of the stream begins; others join by waiting for its events. It ends for all at once.
void standin_begin_capture(void* stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.captures[stream] = {};
}
void standin_end_captures() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.captures.clear();
  s.graph.clear();
  for (auto& [handle, event] : s.events) event.captured = false;
}
// A kernel, captured or not.
void standin_launch(void* stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto capture = s.captures.find(stream);
  if (capture == s.captures.end()) return;
  auto* const node = reinterpret_cast<NodePtr>(0x9000 + 0x10 * s.graph.size());
  s.graph[node] = capture->second;
  capture->second = {node};
}
void standin_set_capturing(int capturing) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.capturing = capturing != 0;
}

}  // extern "C"
