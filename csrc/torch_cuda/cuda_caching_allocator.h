// Our caching allocator as the allocator of `torch.cuda`: every function of its interface over
// the GPUs' DeviceMemory. Built only against a CUDA build of torch.
#pragma once

#include <cstdint>
#include <memory>

#include <c10/cuda/CUDACachingAllocator.h>

namespace mybackend::torch_cuda {

// Makes it the allocator of torch.cuda. Throws, and changes nothing, when there are no GPUs, when
// the configuration asks for what cannot work there, and when torch.cuda has been initialized.
void install();
bool installed();
// Of the c10::Allocator that install() puts there.
std::uintptr_t allocator_address();

}  // namespace mybackend::torch_cuda
