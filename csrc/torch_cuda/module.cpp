// The Python module mybackend._cuda.
#include <torch/extension.h>

#include "torch_cuda/cuda_caching_allocator.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", &mybackend::torch_cuda::install);
  m.def("installed", &mybackend::torch_cuda::installed);
  // For _C, which is built for any torch.
  m.def("_allocator_address", &mybackend::torch_cuda::allocator_address);
}
