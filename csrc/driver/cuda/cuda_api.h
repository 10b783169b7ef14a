// The part of a GPU driver library that we call, found by name at run time: no header and no
// library of CUDA or HIP is needed to build. The table below is the only place that knows the
// names of the symbols.
//
// The types repeat the ABI of cuda.h (CUDA 12 and 13); HIP's runtime has the same shapes.
// Status: the HIP column was written from HIP's public headers and has not run on hardware.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace mybackend::cuda {

using Result = int;
inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kNoMemory = 2;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kNotReadyResult = 600;
inline constexpr Result kContextIsDestroyed = 709;
inline constexpr Result kNotSupportedResult = 801;

using DeviceOrdinal = int;
using ContextPtr = void*;
using StreamPtr = void*;
using EventPtr = void*;
using GraphPtr = void*;
using NodePtr = void*;
using DevicePtr = std::uint64_t;
using MemoryHandle = std::uint64_t;
using HostFunction = void (*)(void*);

enum Attribute : int {
  kMultiprocessorCount = 16,
  kVirtualMemorySupported = 102,
  kPosixHandlesSupported = 103,
  kGpuDirectRdmaSupported = 110,
};
enum EventFlags : unsigned { kEventDefault = 0 };
enum StreamFlags : unsigned { kStreamNonBlocking = 1 };
enum CaptureMode : int { kCaptureRelaxed = 2 };
enum CaptureStatus : int { kCaptureNone = 0, kCaptureActive = 1 };
enum CaptureUpdate : unsigned { kSetDependencies = 1 };
enum HostFlags : unsigned { kHostPortable = 1 };
enum HandleType : int { kNoHandle = 0, kPosixFileDescriptor = 1 };

struct Location {
  int type = 1;  // device memory
  int id = 0;
};

struct AllocationProperties {
  int type = 1;                            // pinned
  int requested_handle_types = kNoHandle;  // what it can be exported as
  Location location;
  void* windows_metadata = nullptr;
  struct {
    unsigned char compression_type = 0;
    unsigned char gpu_direct_rdma_capable = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};

struct AccessDescription {
  Location location;
  int flags = 3;  // read and write
};

// X(member, CUDA's symbol, HIP's symbol, parameter types)
#define MYBACKEND_CUDA_SYMBOLS(X)                                                                                                          \
  X(init, "cuInit", "hipInit", unsigned)                                                                                                   \
  X(driver_get_version, "cuDriverGetVersion", "hipDriverGetVersion", int*)                                                                 \
  X(get_error_name, "cuGetErrorName", "hipDrvGetErrorName", Result, const char**)                                                          \
  X(get_error_string, "cuGetErrorString", "hipDrvGetErrorString", Result, const char**)                                                    \
  X(device_get_count, "cuDeviceGetCount", "hipGetDeviceCount", int*)                                                                       \
  X(device_get, "cuDeviceGet", "hipDeviceGet", DeviceOrdinal*, int)                                                                        \
  X(device_get_name, "cuDeviceGetName", "hipDeviceGetName", char*, int, DeviceOrdinal)                                                     \
  X(device_get_attribute, "cuDeviceGetAttribute", "hipDeviceGetAttribute", int*, int, DeviceOrdinal)                                       \
  X(device_total_memory, "cuDeviceTotalMem_v2", "hipDeviceTotalMem", std::size_t*, DeviceOrdinal)                                          \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", "hipDevicePrimaryCtxRetain", ContextPtr*, DeviceOrdinal)                           \
  X(primary_context_release, "cuDevicePrimaryCtxRelease_v2", "hipDevicePrimaryCtxRelease", DeviceOrdinal)                                  \
  X(context_get_current, "cuCtxGetCurrent", "hipCtxGetCurrent", ContextPtr*)                                                               \
  X(context_push_current, "cuCtxPushCurrent_v2", "hipCtxPushCurrent", ContextPtr)                                                          \
  X(context_pop_current, "cuCtxPopCurrent_v2", "hipCtxPopCurrent", ContextPtr*)                                                            \
  X(context_synchronize, "cuCtxSynchronize", "hipDeviceSynchronize")                                                                       \
  X(stream_priority_range, "cuCtxGetStreamPriorityRange", "hipDeviceGetStreamPriorityRange", int*, int*)                                   \
  X(memory_get_info, "cuMemGetInfo_v2", "hipMemGetInfo", std::size_t*, std::size_t*)                                                       \
  X(memory_allocate, "cuMemAlloc_v2", "hipMalloc", DevicePtr*, std::size_t)                                                                \
  X(memory_free, "cuMemFree_v2", "hipFree", DevicePtr)                                                                                     \
  X(memory_granularity, "cuMemGetAllocationGranularity", "hipMemGetAllocationGranularity", std::size_t*, const AllocationProperties*, int) \
  X(address_reserve, "cuMemAddressReserve", "hipMemAddressReserve", DevicePtr*, std::size_t, std::size_t, DevicePtr, unsigned long long)   \
  X(address_free, "cuMemAddressFree", "hipMemAddressFree", DevicePtr, std::size_t)                                                         \
  X(physical_create, "cuMemCreate", "hipMemCreate", MemoryHandle*, std::size_t, const AllocationProperties*, unsigned long long)           \
  X(physical_release, "cuMemRelease", "hipMemRelease", MemoryHandle)                                                                       \
  X(memory_map, "cuMemMap", "hipMemMap", DevicePtr, std::size_t, std::size_t, MemoryHandle, unsigned long long)                            \
  X(memory_unmap, "cuMemUnmap", "hipMemUnmap", DevicePtr, std::size_t)                                                                     \
  X(memory_set_access, "cuMemSetAccess", "hipMemSetAccess", DevicePtr, std::size_t, const AccessDescription*, std::size_t)                 \
  X(physical_export, "cuMemExportToShareableHandle", "hipMemExportToShareableHandle", void*, MemoryHandle, int, unsigned long long)        \
  X(physical_import, "cuMemImportFromShareableHandle", "hipMemImportFromShareableHandle", MemoryHandle*, void*, int)                       \
  X(memory_copy_async, "cuMemcpyAsync", "hipMemcpyDtoDAsync", DevicePtr, DevicePtr, std::size_t, StreamPtr)                                \
  X(host_allocate, "cuMemHostAlloc", "hipHostMalloc", void**, std::size_t, unsigned)                                                       \
  X(host_free, "cuMemFreeHost", "hipHostFree", void*)                                                                                      \
  X(host_register, "cuMemHostRegister_v2", "hipHostRegister", void*, std::size_t, unsigned)                                                \
  X(host_unregister, "cuMemHostUnregister", "hipHostUnregister", void*)                                                                    \
  X(stream_create, "cuStreamCreateWithPriority", "hipStreamCreateWithPriority", StreamPtr*, unsigned, int)                                 \
  X(stream_query, "cuStreamQuery", "hipStreamQuery", StreamPtr)                                                                            \
  X(stream_synchronize, "cuStreamSynchronize", "hipStreamSynchronize", StreamPtr)                                                          \
  X(stream_wait_event, "cuStreamWaitEvent", "hipStreamWaitEvent", StreamPtr, EventPtr, unsigned)                                           \
  X(launch_host_function, "cuLaunchHostFunc", "hipLaunchHostFunc", StreamPtr, HostFunction, void*)                                         \
  X(thread_exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode", int*)                         \
  X(stream_capture_info, "cuStreamGetCaptureInfo_v2", "hipStreamGetCaptureInfo_v2", StreamPtr, int*, std::uint64_t*, GraphPtr*,            \
    const NodePtr**, std::size_t*)                                                                                                         \
  X(stream_update_capture, "cuStreamUpdateCaptureDependencies", "hipStreamUpdateCaptureDependencies", StreamPtr, NodePtr*, std::size_t,    \
    unsigned)                                                                                                                              \
  X(graph_add_empty_node, "cuGraphAddEmptyNode", "hipGraphAddEmptyNode", NodePtr*, GraphPtr, const NodePtr*, std::size_t)                  \
  X(graph_node_dependencies, "cuGraphNodeGetDependencies", "hipGraphNodeGetDependencies", NodePtr, NodePtr*, std::size_t*)                 \
  X(event_create, "cuEventCreate", "hipEventCreateWithFlags", EventPtr*, unsigned)                                                         \
  X(event_destroy, "cuEventDestroy_v2", "hipEventDestroy", EventPtr)                                                                       \
  X(event_record, "cuEventRecord", "hipEventRecord", EventPtr, StreamPtr)                                                                  \
  X(event_query, "cuEventQuery", "hipEventQuery", EventPtr)                                                                                \
  X(event_synchronize, "cuEventSynchronize", "hipEventSynchronize", EventPtr)                                                              \
  X(event_elapsed_ms, "cuEventElapsedTime", "hipEventElapsedTime", float*, EventPtr, EventPtr)

enum class Vendor { kCuda, kHip };

struct Api {
#define X(member, cuda_symbol, hip_symbol, ...) Result (*member)(__VA_ARGS__) = nullptr;
  MYBACKEND_CUDA_SYMBOLS(X)
#undef X
  Vendor vendor = Vendor::kCuda;
  std::string library;  // what was opened

  // Opens the vendor's library (libcuda.so.1, libamdhip64.so; MYBACKEND_CUDA_LIBRARY names another
  // one) and finds every symbol. On an error *out is unchanged and the message says what was
  // looked for. The library stays open for the life of the process.
  static Status load(Vendor vendor, Api* out);

  // The symbol's name, for messages; `member` as in the table.
  const char* symbol(const char* member) const noexcept;
  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"; the number when the library does not know it.
  std::string error_text(Result result) const;
};

}  // namespace mybackend::cuda
