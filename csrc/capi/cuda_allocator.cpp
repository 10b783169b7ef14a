#include "capi/cuda_allocator.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "capi/runtime.h"

using namespace mybackend;

namespace {

thread_local std::string t_error;

StreamHandle handle(void* stream) {
  return reinterpret_cast<std::uintptr_t>(stream);
}

// The GPUs' memory when it can be had and the device exists; else nullptr and t_error.
DeviceMemory* memory_for(int device) {
  if (caching::in_segment_source()) {
    t_error = "mybackend: a memory pool cannot take its segments from the allocator that it belongs to";
    return nullptr;
  }
  Status status;
  DeviceMemory* memory = Runtime::get().cuda_memory(&status);
  if (memory == nullptr) {
    t_error = "mybackend: " + status.message();
  } else if (device < 0 || device >= memory->device_count()) {
    t_error = "mybackend: device " + std::to_string(device) + " does not exist; there are " + std::to_string(memory->device_count());
    memory = nullptr;
  }
  return memory;
}

int result_of(const Status& status) {
  if (status.ok()) return 0;
  t_error = "mybackend: " + status.message();
  return 1;
}

void warn(const char* function, const std::string& what) {
  std::fprintf(stderr, "mybackend: %s: %s\n", function, what.c_str());
}

std::string stat_json(const caching::Stat& s) {
  return "{\"current\": " + std::to_string(s.current) + ", \"peak\": " + std::to_string(s.peak) +
         ", \"allocated\": " + std::to_string(s.allocated) + ", \"freed\": " + std::to_string(s.freed) + "}";
}

char* to_c(const std::string& text) {
  char* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy != nullptr) std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

caching::PoolId pool_id(const std::pair<unsigned long long, unsigned long long>& pool) {
  return {pool.first, pool.second};
}

}  // namespace

extern "C" {

void* mybackend_cuda_try_malloc(size_t size, int device, void* stream) {
  t_error.clear();
  if (size == 0) return nullptr;
  DeviceMemory* memory = memory_for(device);
  if (memory == nullptr) return nullptr;
  AllocationFailure failure;
  void* ptr = memory->allocate(device, size, handle(stream), &failure);
  if (ptr == nullptr) t_error = std::move(failure.message);
  return ptr;
}

int mybackend_cuda_try_free(void* ptr) {
  t_error.clear();
  DeviceMemory* memory = Runtime::get().cuda_memory_if_started();
  if (memory != nullptr && memory->free(ptr)) return 1;
  char text[96];
  std::snprintf(text, sizeof text, "mybackend: free of %p, which is not allocated: freed before, or never ours", ptr);
  t_error = text;
  return 0;
}

void* mybackend_malloc(ssize_t size, int device, void* stream) {
  if (size < 0) throw std::runtime_error("mybackend_malloc: a negative size: " + std::to_string(size));
  void* ptr = mybackend_cuda_try_malloc(static_cast<size_t>(size), device, stream);
  if (ptr == nullptr && size > 0) throw std::runtime_error(t_error);
  return ptr;
}

void mybackend_free(void* ptr, ssize_t, int device, void*) {
  if (ptr == nullptr) return;
  DeviceMemory* memory = Runtime::get().cuda_memory_if_started();
  if (memory != nullptr && memory->free(ptr, device)) return;
  char text[96];
  std::snprintf(text, sizeof text, "%p is not allocated: freed before, or never ours", ptr);
  warn("mybackend_free", text);
}

const char* mybackend_cuda_last_error(void) {
  return t_error.c_str();
}

int mybackend_cuda_start(void) {
  t_error.clear();
  return memory_for(0) != nullptr ? 0 : 1;
}

int mybackend_cuda_device_count(void) {
  DeviceMemory* memory = memory_for(0);
  return memory != nullptr ? memory->device_count() : 0;
}

int mybackend_cuda_configure(const char* text) {
  t_error.clear();
  return result_of(Runtime::get().configure(text, "mybackend_cuda_configure"));
}

void mybackend_cuda_empty_cache(void) {
  DeviceMemory* memory = Runtime::get().cuda_memory_if_started();
  for (int device = 0; memory != nullptr && device < memory->device_count(); ++device) memory->caching(device).empty_cache();
}

int mybackend_cuda_set_memory_fraction(double fraction, int device) {
  t_error.clear();
  DeviceMemory* memory = memory_for(device);
  return memory == nullptr ? 1 : result_of(memory->caching(device).set_memory_fraction(fraction));
}

char* mybackend_cuda_stats_json(int device) {
  t_error.clear();
  DeviceMemory* memory = memory_for(device);
  if (memory == nullptr) return nullptr;
  const caching::DeviceStats stats = memory->stats(device);
  std::string text = "{";
  const auto comma = [&] {
    if (text.size() > 1) text += ", ";
  };
  static constexpr const char* kPools[] = {"all", "small_pool", "large_pool"};
#define X(name)                                                                                 \
  comma();                                                                                      \
  text += "\"" #name "\": {";                                                                   \
  for (int i = 0; i < caching::kStatPoolCount; ++i)                                             \
    text += std::string(i > 0 ? ", \"" : "\"") + kPools[i] + "\": " + stat_json(stats.name[i]); \
  text += "}";
  MYBACKEND_STAT_ARRAYS(X)
#undef X
#define X(name) \
  comma();      \
  text += "\"" #name "\": " + stat_json(stats.name);
  MYBACKEND_STAT_SINGLES(X)
#undef X
#define X(name) \
  comma();      \
  text += "\"" #name "\": " + std::to_string(stats.name);
  MYBACKEND_STAT_COUNTS(X)
#undef X
  return to_c(text + ", \"max_split_size\": " + std::to_string(stats.max_split_size) + "}");
}

char* mybackend_cuda_segments_json(int device) {
  t_error.clear();
  DeviceMemory* memory = memory_for(device);
  if (memory == nullptr) return nullptr;
  std::string text = "[";
  for (const caching::SegmentInfo& s : memory->caching(device).snapshot(false)) {
    if (text.size() > 1) text += ", ";
    text += "{\"device\": " + std::to_string(s.device) + ", \"address\": " + std::to_string(s.address) +
            ", \"total_size\": " + std::to_string(s.total_bytes) + ", \"allocated_size\": " + std::to_string(s.allocated_bytes) +
            ", \"active_size\": " + std::to_string(s.active_bytes) + ", \"requested_size\": " + std::to_string(s.requested_bytes) +
            ", \"stream\": " + std::to_string(s.stream) + ", \"segment_type\": \"" + (s.is_large ? "large" : "small") +
            "\", \"segment_pool_id\": [" + std::to_string(s.pool_id.first) + ", " + std::to_string(s.pool_id.second) +
            "], \"is_expandable\": " + (s.is_expandable ? "true" : "false") + ", \"frames\": [], \"blocks\": [";
    bool first = true;
    for (const caching::BlockInfo& b : s.blocks) {
      text += std::string(first ? "" : ", ") + "{\"address\": " + std::to_string(b.address) + ", \"size\": " + std::to_string(b.bytes) +
              ", \"requested_size\": " + std::to_string(b.requested_bytes) + ", \"state\": \"" +
              (b.allocated ? "active_allocated"
               : b.active  ? "active_pending_free"
                           : "inactive") +
              "\", \"frames\": []}";
      first = false;
    }
    text += "]}";
  }
  return to_c(text + "]");
}

void mybackend_cuda_reset_peak_stats(int device) {
  if (DeviceMemory* memory = memory_for(device)) memory->caching(device).reset_peak_stats();
}
void mybackend_cuda_reset_accumulated_stats(int device) {
  if (DeviceMemory* memory = memory_for(device)) memory->caching(device).reset_accumulated_stats();
}
void mybackend_string_free(char* text) {
  std::free(text);
}

// --- For a pluggable allocator's object: these report by exceptions, as torch expects ---

void mybackend_init(int) {
  if (mybackend_cuda_start() != 0) throw std::runtime_error(t_error);
}

void mybackend_reset(void) {
  mybackend_cuda_empty_cache();
}

void mybackend_memory_fraction(double fraction, int device) {
  if (mybackend_cuda_set_memory_fraction(fraction, device) != 0) throw std::runtime_error(t_error);
}

void* mybackend_base_allocation(void* ptr, size_t* size) {
  DeviceMemory* memory = Runtime::get().cuda_memory_if_started();
  const int device = memory != nullptr ? memory->device_of(ptr) : -1;
  if (device >= 0) {
    const auto [base, bytes] = memory->caching(device).driver_allocation(ptr);
    if (base != nullptr) {
      if (size != nullptr) *size = bytes;
      return base;
    }
  }
  throw std::runtime_error("mybackend_base_allocation: the pointer is not allocated");
}

void mybackend_record_stream(void* ptr, void* stream) {
  if (DeviceMemory* memory = Runtime::get().cuda_memory_if_started()) memory->record_stream(ptr, handle(stream));
}

void mybackend_begin_allocate_to_pool(int device, std::pair<unsigned long long, unsigned long long> pool,
                                      std::function<bool(void*)> filter) {
  DeviceMemory* memory = memory_for(device);
  if (memory == nullptr) throw std::runtime_error(t_error);
  const Status status = memory->caching(device).begin_allocate_to_pool(pool_id(pool), [filter = std::move(filter)](StreamHandle stream) {
    return filter(reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream)));
  });
  if (result_of(status) != 0) throw std::runtime_error(t_error);
}

void mybackend_end_allocate_to_pool(int device, std::pair<unsigned long long, unsigned long long> pool) {
  DeviceMemory* memory = memory_for(device);
  if (memory == nullptr || result_of(memory->caching(device).end_allocate_to_pool(pool_id(pool))) != 0) throw std::runtime_error(t_error);
}

void mybackend_release_pool(int device, std::pair<unsigned long long, unsigned long long> pool) {
  DeviceMemory* memory = memory_for(device);
  if (memory == nullptr || result_of(memory->caching(device).release_pool(pool_id(pool))) != 0) throw std::runtime_error(t_error);
}

}  // extern "C"
