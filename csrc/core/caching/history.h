// The recorded history of one device: what happened, in order, the newest max_entries of it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/caching/block.h"

namespace mybackend::caching {

enum class Action : std::uint8_t {
  kAlloc,
  kFreeRequested,
  kFreeCompleted,
  kSegmentAlloc,
  kSegmentFree,
  kSegmentMap,
  kSegmentUnmap,
  kSnapshot,
  kOom,
};

inline constexpr const char* kActionNames[] = {
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "snapshot", "oom"};

struct TraceEntry {
  Action action;
  std::uintptr_t address;  // for kOom: the device's free bytes
  std::size_t bytes;       // requested bytes of a block, rounded ones for kOom
  StreamHandle stream;
  std::int64_t time_us;
  PoolId pool_id;
  Context context;
};

class History {
 public:
  bool enabled() const noexcept { return enabled_; }

  void start(std::size_t max_entries) {
    enabled_ = true;
    max_entries_ = max_entries == 0 ? 1 : max_entries;
    clear();
  }
  void stop() { enabled_ = false; }
  void clear() {
    entries_.clear();
    oldest_ = 0;
  }

  void add(TraceEntry entry) {
    if (entries_.size() < max_entries_) {
      entries_.push_back(std::move(entry));
    } else {
      entries_[oldest_] = std::move(entry);
      oldest_ = (oldest_ + 1) % max_entries_;
    }
  }

  std::vector<TraceEntry> entries() const {
    std::vector<TraceEntry> result(entries_.begin() + static_cast<std::ptrdiff_t>(oldest_), entries_.end());
    result.insert(result.end(), entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(oldest_));
    return result;
  }

 private:
  bool enabled_ = false;
  std::size_t max_entries_ = 0;
  std::size_t oldest_ = 0;
  std::vector<TraceEntry> entries_;
};

}  // namespace mybackend::caching
