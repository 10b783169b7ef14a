// A stand-in for what torch asks of the CUDA runtime, over the stand-in for the driver. To be
// preloaded: the runtime's other symbols stay the real library's.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

// What the driver's stand-in has beyond cuda.h's declarations, which rename some calls.
extern "C" {
void standin_advance(void* stream);
int standin_file(void* ptr, std::size_t* bytes);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
}

namespace {

thread_local int t_device = 0;
thread_local cudaError_t t_last = cudaSuccess;

cudaError_t give(CUresult result) {
  cudaError_t error = cudaSuccess;
  switch (result) {
    case CUDA_SUCCESS: return cudaSuccess;  // the last error stays
    case CUDA_ERROR_OUT_OF_MEMORY: error = cudaErrorMemoryAllocation; break;
    case CUDA_ERROR_INVALID_VALUE: error = cudaErrorInvalidValue; break;
    case CUDA_ERROR_NOT_READY: error = cudaErrorNotReady; break;
    case CUDA_ERROR_DEINITIALIZED: error = cudaErrorCudartUnloading; break;
    case CUDA_ERROR_INVALID_HANDLE: error = cudaErrorInvalidResourceHandle; break;
    default: error = cudaErrorUnknown; break;
  }
  return t_last = error;
}

int device_count() {
  int count = 0;
  cuInit(0);
  cuDeviceGetCount(&count);
  return count;
}

// The runtime makes the current device's primary context current by itself.
void bind() {
  CUcontext context = nullptr, current = nullptr;
  cuInit(0);
  cuDevicePrimaryCtxRetain(&context, t_device);
  cuCtxGetCurrent(&current);
  if (current != context) cuCtxSetCurrent(context);
}

std::uintptr_t address(const void* ptr) {
  return reinterpret_cast<std::uintptr_t>(ptr);
}

}  // namespace

extern "C" {

// --- Devices ---
cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = t_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return t_last = cudaErrorInvalidDevice;
  t_device = device;
  bind();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof *properties);
  std::size_t bytes = 0;
  cuInit(0);
  cuDeviceTotalMem(&bytes, device);
  std::strcpy(properties->name, "stand-in");
  properties->totalGlobalMem = bytes;
  properties->major = 9;
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  properties->maxThreadsPerMultiProcessor = 2048;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  bind();
  return give(cuCtxSynchronize());
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return cudaSuccess;
}

// --- Errors ---
cudaError_t cudaGetLastError() {
  const cudaError_t last = t_last;
  t_last = cudaSuccess;
  return last;
}
cudaError_t cudaPeekAtLastError() {
  return t_last;
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaSuccess) return "no error";
  thread_local std::string text;
  text = "error " + std::to_string(static_cast<int>(error)) + " of the stand-in";
  return text.c_str();
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : error == cudaSuccess ? "cudaSuccess" : "cudaErrorOfTheStandIn";
}

// --- Memory ---
cudaError_t cudaMalloc(void** out, std::size_t bytes) {
  bind();
  CUdeviceptr ptr = 0;
  const cudaError_t error = give(cuMemAlloc(&ptr, bytes));
  if (error == cudaSuccess) *out = reinterpret_cast<void*>(ptr);
  return error;
}
cudaError_t cudaFree(void* ptr) {
  bind();
  return ptr == nullptr ? cudaSuccess : give(cuMemFree(address(ptr)));
}
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  bind();
  return give(cuMemGetInfo(free_bytes, total_bytes));
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(dst, src, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* dst, const void* src, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(dst, src, bytes, kind, nullptr);
}
cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, std::size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemsetAsync(void* ptr, int value, std::size_t bytes, cudaStream_t) {
  std::memset(ptr, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* ptr, int value, std::size_t bytes) {
  return cudaMemsetAsync(ptr, value, bytes, nullptr);
}
cudaError_t cudaHostAlloc(void** out, std::size_t bytes, unsigned flags) {
  bind();
  return give(cuMemHostAlloc(out, bytes, flags));
}
cudaError_t cudaFreeHost(void* ptr) {
  return give(cuMemFreeHost(ptr));
}
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) {
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void*) {
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* ptr) {
  std::memset(attributes, 0, sizeof *attributes);
  const bool is_device = address(ptr) >= 0x600000000000 && address(ptr) < 0x7a0000000000;
  attributes->type = is_device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  attributes->device = t_device;
  attributes->devicePointer = const_cast<void*>(ptr);
  return cudaSuccess;
}

// --- Memory of other processes: a handle names a process, a file of its, and the address ---
struct StandInHandle {
  int pid, fd;
  std::size_t bytes;
  void* ptr;
};
static_assert(sizeof(StandInHandle) <= sizeof(cudaIpcMemHandle_t));
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* ptr) {
  StandInHandle h{getpid(), -1, 0, ptr};
  h.fd = standin_file(ptr, &h.bytes);
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &h, sizeof h);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t handle, unsigned) {
  StandInHandle h;
  std::memcpy(&h, &handle, sizeof h);
  *out = h.ptr;
  if (h.pid == getpid()) return cudaSuccess;
  const int fd = open(("/proc/" + std::to_string(h.pid) + "/fd/" + std::to_string(h.fd)).c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return t_last = cudaErrorInvalidValue;
  void* mapped = mmap(nullptr, h.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) return t_last = cudaErrorMemoryAllocation;
  *out = mapped;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void*) {
  return cudaSuccess;
}
// All work is done at once: any event will do.
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t) {
  std::memset(handle, 0, sizeof *handle);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t) {
  bind();
  return give(cuEventCreate(event, 0));
}

// --- Streams and events ---
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  bind();
  return give(cuStreamCreateWithPriority(stream, flags, priority));
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  bind();
  return give(cuStreamQuery(stream));
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  bind();
  return give(cuStreamSynchronize(stream));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  bind();
  return give(cuStreamWaitEvent(stream, event, flags));
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, std::size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return give(cuThreadExchangeStreamCaptureMode(reinterpret_cast<CUstreamCaptureMode*>(mode)));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  bind();
  return give(cuEventCreate(event, flags));
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return give(cuEventDestroy(event));
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  bind();
  return give(cuEventRecord(event, stream));
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  bind();
  return give(cuEventQuery(event));
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  bind();
  return give(cuEventSynchronize(event));
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return give(cuEventElapsedTime(ms, start, end));
}

// --- The driver's calls, as the native allocator asks for them ---
static CUresult not_supported() {
  return CUDA_ERROR_NOT_SUPPORTED;
}
static CUresult set_context_and_reserve(CUdeviceptr* ptr, std::size_t bytes, std::size_t alignment, CUdeviceptr wanted,
                                        unsigned long long flags) {
  bind();
  return cuMemAddressReserve(ptr, bytes, alignment, wanted, flags);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(&set_context_and_reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&cuMemAddressFree)},
      {"cuMemCreate", reinterpret_cast<void*>(&cuMemCreate)},
      {"cuMemRelease", reinterpret_cast<void*>(&cuMemRelease)},
      {"cuMemMap", reinterpret_cast<void*>(&cuMemMap)},
      {"cuMemUnmap", reinterpret_cast<void*>(&cuMemUnmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&cuMemSetAccess)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&cuMemGetAllocationGranularity)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&cuDeviceGetAttribute)},
      {"cuGetErrorString", reinterpret_cast<void*>(&cuGetErrorString)},
  };
  const auto found = known.find(name);
  *function = found != known.end() ? found->second : reinterpret_cast<void*>(&not_supported);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
