/* The caching allocator over CUDA (or HIP) memory, for programs that take an allocator as C
   functions: `torch.cuda.memory.CUDAPluggableAllocator` first of all. The driver library is
   opened at the first call; nothing here links to it. Settings come from MYBACKEND_ALLOC_CONF,
   else PYTORCH_ALLOC_CONF, else PYTORCH_CUDA_ALLOC_CONF, or mybackend_cuda_configure.

   Sizes are bytes, `stream` is a cudaStream_t. All functions are thread-safe. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* NULL for 0 bytes. Throws a C++ std::runtime_error with the explanation when there is no room
   (PyTorch turns it into a RuntimeError): its callers take any pointer for memory. C programs
   use mybackend_cuda_try_malloc. */
void* mybackend_malloc(ssize_t size, int device, void* stream);
/* `size` and `stream` are not needed and not looked at. A pointer that is not ours, or was freed
   before, is reported on standard error and changes nothing; a wrong `device` is corrected. */
void mybackend_free(void* ptr, ssize_t size, int device, void* stream);

/* As mybackend_malloc, but NULL on an error; mybackend_cuda_last_error then explains. */
void* mybackend_cuda_try_malloc(size_t size, int device, void* stream);
/* 1 when it was freed, 0 when the pointer is not ours; then the last error tells. */
int mybackend_cuda_try_free(void* ptr);
/* Of the calling thread; "" when there was none. Valid until the thread's next call. */
const char* mybackend_cuda_last_error(void);

/* Starts the driver: 0, or 1 and the last error. */
int mybackend_cuda_start(void);
int mybackend_cuda_device_count(void);
/* "key:value,…": 0, or 1 and the last error; then nothing changed. */
int mybackend_cuda_configure(const char* text);
void mybackend_cuda_empty_cache(void);
/* In [0, 1]: 0, or 1 and the last error. */
int mybackend_cuda_set_memory_fraction(double fraction, int device);
/* Statistics of one device as JSON, with the keys of torch.cuda.memory_stats, nested; and its
   segments and blocks as in torch.cuda.memory_snapshot (without stacks). NULL and the last error
   when there is no such device. To be freed with mybackend_string_free. */
char* mybackend_cuda_stats_json(int device);
char* mybackend_cuda_segments_json(int device);
void mybackend_cuda_reset_peak_stats(int device);
void mybackend_cuda_reset_accumulated_stats(int device);
void mybackend_string_free(char* text);

/* What a pluggable allocator's object takes beside the two functions (its set_*_fn). */
void mybackend_init(int device_count);
void mybackend_reset(void);
void mybackend_memory_fraction(double fraction, int device);
/* The start of the driver's allocation that ptr lies in; *size (may be NULL) its bytes. */
void* mybackend_base_allocation(void* ptr, size_t* size);
void mybackend_record_stream(void* ptr, void* stream);

#ifdef __cplusplus
}

#include <functional>
#include <utility>

/* As torch's begin/end/release functions: pool ids are (graph capture, program). */
extern "C" {
void mybackend_begin_allocate_to_pool(int device, std::pair<unsigned long long, unsigned long long> pool,
                                      std::function<bool(void*)> filter);
void mybackend_end_allocate_to_pool(int device, std::pair<unsigned long long, unsigned long long> pool);
void mybackend_release_pool(int device, std::pair<unsigned long long, unsigned long long> pool);
}
#endif
