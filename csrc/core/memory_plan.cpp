#include "core/memory_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/units.h"

namespace mybackend {
namespace {

// Places the allocations in `order`, each in the smallest gap that fits between those already
// placed whose lifetimes overlap with its own. Returns the arena's size.
std::size_t place(const std::vector<PlannedAllocation>& all, const std::vector<std::size_t>& sizes, const std::vector<std::size_t>& order,
                  std::vector<std::size_t>* offsets) {
  std::size_t arena_bytes = 0;
  std::vector<std::size_t> placed;                             // by offset
  std::vector<std::pair<std::size_t, std::size_t>> obstacles;  // [from, to), by from
  for (std::size_t index : order) {
    const PlannedAllocation& a = all[index];
    obstacles.clear();
    for (std::size_t other : placed) {
      const PlannedAllocation& b = all[other];
      if (a.begin < b.end && b.begin < a.end) obstacles.emplace_back((*offsets)[other], (*offsets)[other] + sizes[other]);
    }
    std::size_t best = static_cast<std::size_t>(-1), best_gap = static_cast<std::size_t>(-1), end = 0;
    for (const auto& [from, to] : obstacles) {
      if (from > end && from - end >= sizes[index] && from - end < best_gap) {
        best = end;
        best_gap = from - end;
      }
      end = std::max(end, to);
    }
    if (best == static_cast<std::size_t>(-1)) best = end;
    (*offsets)[index] = best;
    arena_bytes = std::max(arena_bytes, best + sizes[index]);
    placed.insert(
        std::upper_bound(placed.begin(), placed.end(), best, [&](std::size_t offset, std::size_t p) { return offset < (*offsets)[p]; }),
        index);
  }
  return arena_bytes;
}

}  // namespace

void lay_out(MemoryPlan* plan, std::size_t alignment) {
  std::vector<PlannedAllocation>& all = plan->allocations;
  std::vector<std::size_t> sizes(all.size()), order;
  std::vector<std::pair<std::int64_t, std::int64_t>> changes, aligned_changes;  // (time, bytes)
  for (std::size_t i = 0; i < all.size(); ++i) {
    sizes[i] = round_up(all[i].bytes, alignment);
    changes.emplace_back(all[i].begin, static_cast<std::int64_t>(all[i].bytes));
    if (all[i].escapes()) continue;
    order.push_back(i);
    changes.emplace_back(all[i].end, -static_cast<std::int64_t>(all[i].bytes));
    aligned_changes.emplace_back(all[i].begin, static_cast<std::int64_t>(sizes[i]));
    aligned_changes.emplace_back(all[i].end, -static_cast<std::int64_t>(sizes[i]));
  }
  const auto peak = [](std::vector<std::pair<std::int64_t, std::int64_t>>& list) {
    std::sort(list.begin(), list.end());  // times are unique
    std::int64_t now = 0, most = 0;
    for (const auto& [time, bytes] : list) most = std::max(most, now += bytes);
    return static_cast<std::size_t>(most);
  };
  plan->peak_live_bytes = peak(changes);
  plan->lower_bound_bytes = peak(aligned_changes);

  const auto lifetime = [&](std::size_t i) { return all[i].end - all[i].begin; };
  std::vector<std::size_t> offsets(all.size());
  plan->arena_bytes = static_cast<std::size_t>(-1);
  for (int attempt = 0; attempt < 3 && plan->arena_bytes > plan->lower_bound_bytes; ++attempt) {
    std::vector<std::size_t> sorted = order;
    std::stable_sort(sorted.begin(), sorted.end(), [&](std::size_t a, std::size_t b) {
      if (attempt == 0) return sizes[a] != sizes[b] ? sizes[a] > sizes[b] : lifetime(a) > lifetime(b);
      if (attempt == 1) return lifetime(a) != lifetime(b) ? lifetime(a) > lifetime(b) : sizes[a] > sizes[b];
      return static_cast<double>(sizes[a]) * static_cast<double>(lifetime(a)) >
             static_cast<double>(sizes[b]) * static_cast<double>(lifetime(b));
    });
    const std::size_t arena_bytes = place(all, sizes, sorted, &offsets);
    if (arena_bytes >= plan->arena_bytes) continue;
    plan->arena_bytes = arena_bytes;
    for (std::size_t i : order) all[i].offset = offsets[i];
  }
  if (order.empty()) plan->arena_bytes = 0;
}

const char* check_plan(const MemoryPlan& plan, std::size_t alignment) {
  // Sweeps over time with the taken bytes at each moment.
  std::vector<std::pair<std::int64_t, std::size_t>> moments;
  std::int64_t last_begin = -1;
  for (std::size_t i = 0; i < plan.allocations.size(); ++i) {
    const PlannedAllocation& a = plan.allocations[i];
    if (a.bytes == 0) return "an allocation of 0 bytes";
    if (a.begin <= last_begin) return "allocations are not in the order of their begin";
    last_begin = a.begin;
    if (a.escapes()) continue;
    if (a.end <= a.begin) return "an allocation ends before it begins";
    if (a.offset % alignment != 0) return "an offset is not aligned";
    if (a.bytes > plan.arena_bytes || a.offset > plan.arena_bytes - a.bytes) return "an allocation lies outside the arena";
    moments.emplace_back(a.begin, i);
    moments.emplace_back(a.end, i);
  }
  std::sort(moments.begin(), moments.end());
  std::map<std::size_t, std::size_t> taken;
  for (const auto& [time, i] : moments) {
    const PlannedAllocation& a = plan.allocations[i];
    if (time == a.end) {
      taken.erase(a.offset);
      continue;
    }
    const auto next = taken.upper_bound(a.offset);
    if ((next != taken.end() && next->first < a.offset + a.bytes) || (next != taken.begin() && std::prev(next)->second > a.offset)) {
      return "two allocations that are alive at one time share bytes";
    }
    taken.emplace(a.offset, a.offset + a.bytes);
  }
  return "";
}

void PlanRecorder::on_allocate(const void* ptr, std::size_t bytes) {
  if (ptr == nullptr || bytes == 0) return;
  std::lock_guard lock(mutex_);
  live_[ptr] = allocations_.size();
  allocations_.push_back({bytes, time_++, -1, 0});
}

void PlanRecorder::on_free(const void* ptr) noexcept {
  std::lock_guard lock(mutex_);
  const auto found = live_.find(ptr);
  if (found == live_.end()) return;  // older than the recording
  allocations_[found->second].end = time_++;
  live_.erase(found);
}

MemoryPlan PlanRecorder::finish(std::size_t alignment) {
  MemoryPlan plan;
  {
    std::lock_guard lock(mutex_);
    plan.allocations = std::move(allocations_);
    allocations_.clear();
    live_.clear();
    time_ = 0;
  }
  lay_out(&plan, alignment);
  return plan;
}

void PlanSession::restart() noexcept {
  std::lock_guard lock(mutex_);
  next_ = 0;
  counts_ = {};
}

bool PlanSession::is_free(std::size_t begin, std::size_t end) const {
  const auto next = taken_.lower_bound(begin);
  if (next != taken_.end() && next->first < end) return false;
  return next == taken_.begin() || std::prev(next)->second <= begin;
}

void* PlanSession::allocate(std::size_t bytes) {
  constexpr std::size_t kLookAhead = 32;
  std::lock_guard lock(mutex_);
  std::size_t index = next_;
  const std::size_t limit = std::min(plan_.allocations.size(), next_ + kLookAhead);
  while (index < limit && plan_.allocations[index].bytes != bytes) ++index;
  if (index >= limit) {  // one too many: the next one may be the expected one
    ++counts_.fell_through;
    return nullptr;
  }
  next_ = index + 1;
  const PlannedAllocation& a = plan_.allocations[index];
  if (a.escapes()) {
    ++counts_.escaping;
    return nullptr;
  }
  if (!is_free(a.offset, a.offset + a.bytes)) {  // an earlier one lives longer than it did
    ++counts_.fell_through;
    return nullptr;
  }
  taken_.emplace(a.offset, a.offset + a.bytes);
  ++counts_.served;
  return reinterpret_cast<void*>(arena_ + a.offset);
}

bool PlanSession::free(const void* ptr) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::lock_guard lock(mutex_);
  if (address < arena_ || address - arena_ >= plan_.arena_bytes) return false;
  return taken_.erase(address - arena_) != 0;
}

PlanCounts PlanSession::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

std::size_t PlanSession::live_count() const {
  std::lock_guard lock(mutex_);
  return taken_.size();
}

}  // namespace mybackend
