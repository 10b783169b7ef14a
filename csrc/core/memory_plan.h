// A memory planner: one recorded iteration is laid out in an arena once, and later iterations
// take their memory from there.
//
//   record  PlanRecorder notes each allocation and free: a sequence number is the time
//   plan    lay_out() gives each allocation that ended within the iteration an offset, so that
//           no two whose lifetimes overlap share bytes. What outlived the iteration (gradients,
//           results) is `escaping` and stays with the ordinary allocator
//   use     PlanSession serves the n-th allocation at its offset if it asks for the same bytes
//           and the place is free. Anything else falls through to the ordinary allocator and is
//           counted; after an allocation too many or too few the sequence is found again
//
// Torch-free. Sizes in bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace mybackend {

struct PlannedAllocation {
  std::size_t bytes = 0;
  std::int64_t begin = 0;  // time of the allocation
  std::int64_t end = -1;   // of its free; -1: escaping
  std::size_t offset = 0;  // in the arena; of escaping ones without meaning

  bool escapes() const noexcept { return end < 0; }
};

struct MemoryPlan {
  std::vector<PlannedAllocation> allocations;  // in order of begin
  std::size_t arena_bytes = 0;
  // No arena can be smaller: the most bytes (each rounded up to the alignment) of planned
  // allocations that are alive at one time.
  std::size_t lower_bound_bytes = 0;
  // The most bytes alive at one time, as asked, escaping ones included.
  std::size_t peak_live_bytes = 0;
};

// Fills in offsets and the three sizes: best fit in decreasing size, and in two other orders; the
// smallest arena wins. `alignment` is a power of two.
void lay_out(MemoryPlan* plan, std::size_t alignment);
// An empty string, or why the plan cannot be used: overlapping bytes, an offset outside.
const char* check_plan(const MemoryPlan& plan, std::size_t alignment);

class PlanRecorder {
 public:
  void on_allocate(const void* ptr, std::size_t bytes);
  void on_free(const void* ptr) noexcept;
  // What was recorded, laid out.
  MemoryPlan finish(std::size_t alignment);

 private:
  std::mutex mutex_;
  std::int64_t time_ = 0;
  std::vector<PlannedAllocation> allocations_;
  std::unordered_map<const void*, std::size_t> live_;
};

struct PlanCounts {
  std::int64_t served = 0;        // from the arena
  std::int64_t escaping = 0;      // known to outlive the iteration: from the ordinary allocator
  std::int64_t fell_through = 0;  // not as planned: from the ordinary allocator
};

class PlanSession {
 public:
  // `arena` holds plan.arena_bytes and outlives the session.
  PlanSession(MemoryPlan plan, void* arena) : plan_(std::move(plan)), arena_(reinterpret_cast<std::uintptr_t>(arena)) {}

  // A new iteration: the sequence starts again.
  void restart() noexcept;
  // The place of this allocation, or nullptr: it falls through.
  void* allocate(std::size_t bytes);
  // False when ptr is not a place that is taken.
  bool free(const void* ptr) noexcept;

  PlanCounts counts() const;  // since restart()
  std::size_t live_count() const;
  void* arena() const noexcept { return reinterpret_cast<void*>(arena_); }

 private:
  bool is_free(std::size_t begin, std::size_t end) const;

  mutable std::mutex mutex_;
  const MemoryPlan plan_;
  const std::uintptr_t arena_;
  std::size_t next_ = 0;
  std::map<std::size_t, std::size_t> taken_;  // offset -> end
  PlanCounts counts_;
};

}  // namespace mybackend
