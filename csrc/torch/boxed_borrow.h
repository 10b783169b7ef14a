// The boxed way to borrow: any operator, through its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace mybackend::glue {

// Runs `op` with the CPU's kernel on aliases of the stack's device tensors.
void borrow_boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Registers borrow_boxed for the operators that have a CPU kernel and a composite one, and none
// of ours: for them the backend fallback would lose to the composite kernel. Once.
void register_boxed_kernels();

}  // namespace mybackend::glue
