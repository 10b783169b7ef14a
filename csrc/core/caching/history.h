// The recorded history of one device: what happened, in order, the newest max_entries of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
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
  kAnnotate,  // note: what was said of the block at `address`
  // What follows is ours: PyTorch's history has no such events, and its viewers do not know them.
  kRecordStream,  // address, requested bytes; stream: the one that uses the block too
  kEmptyCache,    // bytes: what was given back
  kSettings,      // note: the settings that changed
  kFraction,      // note: the new memory fraction
};
inline bool is_own_action(Action action) noexcept {
  return action >= Action::kRecordStream;
}

inline constexpr const char* kActionNames[] = {
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",    "segment_unmap", "snapshot",
    "oom",   "annotate",       "record_stream",  "empty_cache",   "settings",     "memory_fraction"};

// What a thread says of its allocations from now on.
struct HistoryTags {
  std::string compile_context;
  std::string user_metadata;
};
// Of the calling thread.
void set_history_tags(std::shared_ptr<const HistoryTags> tags);
std::shared_ptr<const HistoryTags> history_tags();

struct TraceEntry {
  Action action;
  std::uintptr_t address;  // for kOom: the device's free bytes
  std::size_t bytes;       // requested bytes of a block, rounded ones for kOom
  StreamHandle stream;
  std::int64_t time_us;
  PoolId pool_id;
  Context context;
  std::uint64_t thread = 0;                 // of the operating system
  std::shared_ptr<const std::string> note;  // of few
  std::shared_ptr<const HistoryTags> tags;  // of the thread; null when it has none
};

// When a context (a stack) is captured and kept.
enum class RecordContext : std::uint8_t {
  kNever,
  kState,  // for what is alive
  kAlloc,  // and for allocations in the history
  kAll,    // and for frees
};

using CaptureContext = Context (*)();

struct HistoryOptions {
  std::size_t max_entries = 1;
  RecordContext when = RecordContext::kNever;
  CaptureContext capture = nullptr;  // called under no lock
  std::uint32_t skipped = 0;         // bit per Action that is not recorded
};

class History {
 public:
  bool enabled() const noexcept { return enabled_; }
  // A context for an event of at least this level, or none.
  Context capture(RecordContext level) const {
    return enabled_ && options_.capture != nullptr && options_.when >= level ? options_.capture() : Context();
  }
  // What an entry of the history keeps of a context.
  bool keeps(RecordContext level) const noexcept { return options_.when >= level; }

  History without_entries() const {
    History copy;
    copy.enabled_ = enabled_;
    copy.options_ = options_;
    return copy;
  }

  void start(const HistoryOptions& options, bool clear_old) {
    enabled_ = true;
    options_ = options;
    if (options_.max_entries == 0) options_.max_entries = 1;
    if (clear_old || entries_.size() > options_.max_entries) clear();
  }
  void stop() { enabled_ = false; }
  void clear() {
    entries_.clear();
    oldest_ = 0;
  }

  void add(TraceEntry entry) {
    if ((options_.skipped >> static_cast<int>(entry.action)) & 1) return;
    if (entries_.size() < options_.max_entries) {
      entries_.push_back(std::move(entry));
    } else {
      entries_[oldest_] = std::move(entry);
      oldest_ = (oldest_ + 1) % options_.max_entries;
    }
  }

  // Oldest first.
  std::vector<TraceEntry> entries() const {
    std::vector<TraceEntry> result(entries_.begin() + static_cast<std::ptrdiff_t>(oldest_), entries_.end());
    result.insert(result.end(), entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(oldest_));
    return result;
  }

 private:
  bool enabled_ = false;
  HistoryOptions options_;
  std::size_t oldest_ = 0;
  std::vector<TraceEntry> entries_;
};

}  // namespace mybackend::caching
