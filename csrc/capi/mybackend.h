/* The C ABI of libmybackend_core: what programs without C++ or PyTorch can use. All functions
   are thread-safe and none throws. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* "major.minor.patch" */
const char* mybackend_version(void);

/* At least `nbytes` bytes of host memory aligned to 64, from the calling thread's pool when
   nbytes <= 4 MiB. NULL for 0 bytes and when the system has no memory. */
void* mybackend_cpu_allocate(size_t nbytes);
/* `nbytes` as given to mybackend_cpu_allocate; any thread. */
void mybackend_cpu_free(void* ptr, size_t nbytes);
/* Gives the calling thread's cached blocks back; returns their bytes. Other threads follow at
   their next call. */
size_t mybackend_cpu_trim(void);

/* Live and peak bytes handed out by mybackend_cpu_allocate and allocate_aligned_bytes. */
int64_t mybackend_cpu_live_bytes(void);
int64_t mybackend_cpu_peak_bytes(void);

#ifdef __cplusplus
}
#endif
