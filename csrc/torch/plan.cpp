#include "torch/plan.h"

#include <pthread.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/cpu_allocator.h"
#include "torch/context.h"
#include "torch/cpu_allocator.h"
#include "torch/device_allocator.h"

namespace mybackend::glue {

std::atomic<int> g_plans_in_use{0};

struct PlanArena {
  PlanArena(int target, MemoryPlan plan, c10::DataPtr memory, void* start, StreamHandle stream)
      : target(target), memory(std::move(memory)), stream(stream), session(std::move(plan), start) {}
  const int target;
  c10::DataPtr memory;
  const StreamHandle stream;  // others fall through
  PlanSession session;
  bool orphan = false;  // its plan is gone
};

namespace {

constexpr int kCpu = -1;

std::size_t alignment_of(int target) {
  return target == kCpu ? kCpuAlignment : 512;
}

struct State {
  std::mutex mutex;
  std::map<int, std::unique_ptr<PlanRecorder>> recorders;  // by target
  std::map<int, std::shared_ptr<PlanArena>> active;        // by target
  std::vector<std::shared_ptr<PlanArena>> arenas;          // all that live
};

State& state() {
  static State* instance = [] {
    pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, [] { state().mutex.unlock(); });
    return new State;
  }();
  return *instance;
}

void check_target(int target) {
  if (target != kCpu) check_device_index(static_cast<c10::DeviceIndex>(target));
}

}  // namespace

void* plan_allocate(int target, std::size_t bytes, StreamHandle stream) {
  std::shared_ptr<PlanArena> arena;
  {
    std::lock_guard lock(state().mutex);
    const auto found = state().active.find(target);
    if (found == state().active.end()) return nullptr;
    arena = found->second;
  }
  return bytes != 0 && arena->stream == stream ? arena->session.allocate(bytes) : nullptr;
}

void plan_on_allocate(int target, const void* ptr, std::size_t bytes) {
  std::lock_guard lock(state().mutex);
  const auto found = state().recorders.find(target);
  if (found != state().recorders.end()) found->second->on_allocate(ptr, bytes);
}

bool plan_free(int target, const void* ptr) noexcept {
  std::shared_ptr<PlanArena> ended;  // its memory is freed under no lock
  std::lock_guard lock(state().mutex);
  if (const auto found = state().recorders.find(target); found != state().recorders.end()) found->second->on_free(ptr);
  for (auto arena = state().arenas.begin(); arena != state().arenas.end(); ++arena) {
    if ((*arena)->target != target || !(*arena)->session.free(ptr)) continue;
    if ((*arena)->orphan && (*arena)->session.live_count() == 0) {
      ended = std::move(*arena);
      state().arenas.erase(arena);
      g_plans_in_use.fetch_sub(1);
    }
    return true;
  }
  return false;
}

Plan::Plan(int target, MemoryPlan plan) : target_(target), plan_(std::move(plan)) {
  check_target(target);
  const char* wrong = check_plan(plan_, alignment_of(target));
  TORCH_CHECK_VALUE(*wrong == '\0', "memory plan: ", wrong);
}

Plan::~Plan() {
  if (arena_ == nullptr) return;
  std::lock_guard lock(state().mutex);
  arena_->orphan = true;
  if (arena_->session.live_count() == 0) {
    std::erase(state().arenas, arena_);
    g_plans_in_use.fetch_sub(1);
  }
  // arena_ itself is released after the lock: members end after the destructor's body.
}

void Plan::start_recording(int target) {
  check_target(target);
  if (target == kCpu) install_pooling();
  std::unique_lock lock(state().mutex);
  if (state().recorders.count(target) != 0) {
    lock.unlock();
    if (target == kCpu) uninstall_pooling();
    TORCH_CHECK(false, "a memory plan is being recorded for this device already");
  }
  state().recorders[target] = std::make_unique<PlanRecorder>();
  g_plans_in_use.fetch_add(1);
}

void Plan::cancel_recording(int target) noexcept {
  {
    std::lock_guard lock(state().mutex);
    if (state().recorders.erase(target) == 0) return;
    g_plans_in_use.fetch_sub(1);
  }
  if (target == kCpu) uninstall_pooling();
}

std::unique_ptr<Plan> Plan::finish_recording(int target) {
  std::unique_ptr<PlanRecorder> recorder;
  {
    std::lock_guard lock(state().mutex);
    const auto found = state().recorders.find(target);
    TORCH_CHECK(found != state().recorders.end(), "no memory plan is being recorded for this device");
    recorder = std::move(found->second);
    state().recorders.erase(found);
    g_plans_in_use.fetch_sub(1);
  }
  if (target == kCpu) uninstall_pooling();
  return std::make_unique<Plan>(target, recorder->finish(alignment_of(target)));
}

void Plan::enter() {
  const StreamHandle stream = target_ == kCpu ? 0 : current_stream(static_cast<c10::DeviceIndex>(target_));
  if (target_ == kCpu) install_pooling();
  try {
    if (arena_ == nullptr) {
      // The first bytes stay unused, so that no place begins where a block of the allocator does.
      const std::size_t guard = alignment_of(target_);
      const c10::Device device =
          target_ == kCpu ? c10::Device(c10::DeviceType::CPU) : c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(target_));
      c10::DataPtr memory = target_ == kCpu
                                ? c10::GetAllocator(c10::DeviceType::CPU)->allocate(plan_.arena_bytes + guard)
                                : allocate_device_bytes(static_cast<c10::DeviceIndex>(target_), plan_.arena_bytes + guard, device);
      void* start = static_cast<char*>(memory.get()) + guard;
      auto arena = std::make_shared<PlanArena>(target_, plan_, std::move(memory), start, stream);
      std::lock_guard lock(state().mutex);
      state().arenas.push_back(arena);
      g_plans_in_use.fetch_add(1);
      arena_ = std::move(arena);
    }
    std::lock_guard lock(state().mutex);
    TORCH_CHECK(state().active.count(target_) == 0, "another memory plan is in use for this device");
    arena_->session.restart();
    state().active[target_] = arena_;
  } catch (...) {
    if (target_ == kCpu) uninstall_pooling();
    throw;
  }
}

void Plan::leave() noexcept {
  {
    std::lock_guard lock(state().mutex);
    const auto found = state().active.find(target_);
    if (found == state().active.end() || found->second != arena_) return;
    state().active.erase(found);
  }
  if (target_ == kCpu) uninstall_pooling();
}

PlanCounts Plan::counts() const {
  return arena_ != nullptr ? arena_->session.counts() : PlanCounts();
}

}  // namespace mybackend::glue
