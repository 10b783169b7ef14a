#include "capi/mybackend.h"

#include "core/aligned_bytes.h"
#include "core/cpu_pool.h"

#ifndef MYBACKEND_VERSION
#error "MYBACKEND_VERSION is set by the build"
#endif

using namespace mybackend;

namespace {
MemoryTracker& g_tracker = aligned_bytes_tracker(Device::CPU);  // found once, when the library is loaded
}

const char* mybackend_version(void) {
  return MYBACKEND_VERSION;
}

void* mybackend_cpu_allocate(size_t nbytes) {
  if (nbytes == 0) return nullptr;
  void* ptr = cpu_pool::allocate(nbytes);
  if (ptr != nullptr) g_tracker.track_alloc(nbytes);
  return ptr;
}

void mybackend_cpu_free(void* ptr, size_t nbytes) {
  if (ptr == nullptr) return;
  cpu_pool::deallocate(ptr, nbytes);
  g_tracker.track_free(nbytes);
}

size_t mybackend_cpu_trim(void) {
  return cpu_pool::trim();
}

int64_t mybackend_cpu_live_bytes(void) {
  return g_tracker.stats().current_bytes;
}

int64_t mybackend_cpu_peak_bytes(void) {
  return g_tracker.stats().peak_bytes;
}
