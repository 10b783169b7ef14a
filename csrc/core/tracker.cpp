#include "core/tracker.h"

#include <cstdlib>
#include <mutex>

namespace mybackend {
namespace tracker_detail {

MYBACKEND_HOT_THREAD_LOCAL ThreadTotals* t_totals = nullptr;

namespace {

struct Registry {
  std::mutex mutex;
  ThreadTotals* first = nullptr;
  ThreadTotals shared;  // of threads that exited, and of frees during a thread's exit
  bool used[kMaxTrackers] = {};
};

Registry& registry() {
  static Registry* instance = new Registry;  // outlives every thread
  return *instance;
}

template <class Visit>
void for_each_total(Totals& totals, Visit visit) {
  visit(totals.allocated_bytes);
  visit(totals.allocation_count);
  visit(totals.free_count);
}

thread_local constinit bool t_exited = false;

struct Owner {
  ThreadTotals* totals;
  Owner() : totals(new ThreadTotals) {
    Registry& r = registry();
    std::lock_guard lock(r.mutex);
    totals->next = r.first;
    if (totals->next != nullptr) totals->next->previous = totals;
    r.first = totals;
    t_totals = totals;
  }
  ~Owner() {
    t_exited = true;
    t_totals = nullptr;
    Registry& r = registry();
    std::lock_guard lock(r.mutex);
    for (int id = 0; id < kMaxTrackers; ++id) {
      Totals& from = totals->of[id];
      Totals& to = r.shared.of[id];
      to.allocated_bytes.fetch_add(from.allocated_bytes, std::memory_order_relaxed);
      to.allocation_count.fetch_add(from.allocation_count, std::memory_order_relaxed);
      to.free_count.fetch_add(from.free_count, std::memory_order_relaxed);
    }
    if (totals->previous != nullptr)
      totals->previous->next = totals->next;
    else
      r.first = totals->next;
    if (totals->next != nullptr) totals->next->previous = totals->previous;
    delete totals;
  }
};

}  // namespace

ThreadTotals& make_thread_totals() noexcept {
  if (!t_exited) {
    try {
      thread_local Owner owner;
      return *owner.totals;
    } catch (...) {  // no memory for the counters: share
    }
  }
  return registry().shared;
}

void lock_for_fork() {
  registry().mutex.lock();
}
void unlock_after_fork() {
  registry().mutex.unlock();
}

}  // namespace tracker_detail

MemoryTracker::MemoryTracker() {
  tracker_detail::Registry& r = tracker_detail::registry();
  std::lock_guard lock(r.mutex);
  for (id_ = 0; id_ < tracker_detail::kMaxTrackers && r.used[id_]; ++id_) {
  }
  if (id_ == tracker_detail::kMaxTrackers) std::abort();  // one per device: cannot be reached
  r.used[id_] = true;
}

MemoryTracker::~MemoryTracker() {
  tracker_detail::Registry& r = tracker_detail::registry();
  std::lock_guard lock(r.mutex);
  r.used[id_] = false;
  const auto clear = [](std::atomic<std::int64_t>& counter) { counter.store(0, std::memory_order_relaxed); };
  tracker_detail::for_each_total(r.shared.of[id_], clear);
  for (tracker_detail::ThreadTotals* t = r.first; t != nullptr; t = t->next) tracker_detail::for_each_total(t->of[id_], clear);
}

TrackerStats MemoryTracker::stats() const noexcept {
  TrackerStats s;
  tracker_detail::Registry& r = tracker_detail::registry();
  std::lock_guard lock(r.mutex);
  const auto add = [&](const tracker_detail::ThreadTotals& t) {
    s.total_allocated_bytes += t.of[id_].allocated_bytes.load(std::memory_order_relaxed);
    s.allocation_count += t.of[id_].allocation_count.load(std::memory_order_relaxed);
    s.free_count += t.of[id_].free_count.load(std::memory_order_relaxed);
  };
  add(r.shared);
  for (const tracker_detail::ThreadTotals* t = r.first; t != nullptr; t = t->next) add(*t);
  s.current_bytes = current_.load(std::memory_order_relaxed);
  s.peak_bytes = peak_.load(std::memory_order_relaxed);
  s.total_freed_bytes = s.total_allocated_bytes - s.current_bytes - base_.total_freed_bytes;
  s.total_allocated_bytes -= base_.total_allocated_bytes;
  s.allocation_count -= base_.allocation_count;
  s.free_count -= base_.free_count;
  return s;
}

void MemoryTracker::reset_totals() noexcept {
  base_ = TrackerStats();
  base_ = stats();
}

}  // namespace mybackend
