// Memory plans (core/memory_plan.h) between PyTorch and the allocators: who records, who serves.
// A target is the CPU (-1) or a device.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>

#include "core/memory_plan.h"
#include "driver/driver.h"

namespace mybackend::glue {

// Whether anything is recorded or any arena lives: all that an allocation looks at otherwise.
extern std::atomic<int> g_plans_in_use;
inline bool plans_in_use() noexcept {
  return g_plans_in_use.load(std::memory_order_relaxed) != 0;
}

// For the allocators, only when plans_in_use(). plan_allocate: a place in the arena of the plan
// in use, or nullptr; then plan_on_allocate tells what was allocated instead. `stream` is 0 for
// the CPU. plan_free: whether ptr was such a place; notes the free in any case.
void* plan_allocate(int target, std::size_t bytes, StreamHandle stream);
void plan_on_allocate(int target, const void* ptr, std::size_t bytes);
bool plan_free(int target, const void* ptr) noexcept;

struct PlanArena;

// A plan that a program holds. Its arena is made at the first enter() and lives until the plan
// and all that was served from it are gone.
class Plan {
 public:
  Plan(int target, MemoryPlan plan);  // throws for a plan that contradicts itself
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  static void start_recording(int target);
  static std::unique_ptr<Plan> finish_recording(int target);
  static void cancel_recording(int target) noexcept;

  // One iteration: from enter() to leave() the target's allocations follow the plan.
  void enter();
  void leave() noexcept;

  int target() const noexcept { return target_; }
  const MemoryPlan& plan() const noexcept { return plan_; }
  PlanCounts counts() const;  // of the last iteration

 private:
  const int target_;
  const MemoryPlan plan_;
  std::shared_ptr<PlanArena> arena_;
};

}  // namespace mybackend::glue
