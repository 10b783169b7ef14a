#include "core/caching/caching_allocator.h"

#include <algorithm>

#include "base/thread_id.h"
#include "core/caching/expandable_range.h"
#include "core/caching/sizing.h"

namespace mybackend::caching {

namespace {
thread_local std::shared_ptr<const HistoryTags> t_history_tags;
}
void set_history_tags(std::shared_ptr<const HistoryTags> tags) {
  t_history_tags = std::move(tags);
}
std::shared_ptr<const HistoryTags> history_tags() {
  return t_history_tags;
}

CachingAllocator::CachingAllocator(Driver* driver, int device, const Settings& settings)
    : driver_(driver), device_(device), pending_events_(StreamHash{device}) {
  DeviceInfo info;
  if (driver_->device_info(device_, &info).ok()) total_bytes_ = info.total_bytes;
  apply_settings(settings);
}

CachingAllocator::~CachingAllocator() {
  pending_events_.for_each([&](StreamHandle, std::deque<PendingEvent>& events) {
    for (const PendingEvent& pending : events) driver_->event_destroy(device_, pending.event);
    return true;
  });
  for (EventHandle event : spare_events_) driver_->event_destroy(device_, event);
  for (auto& segment : segments_) {
    if (segment->expandable)
      segment->expandable.reset();
    else
      (void)give_back(*segment->pool, reinterpret_cast<void*>(segment->address), segment->bytes, segment->stream);
  }
}

// --- Records --------------------------------------------------------------------------------

Segment* CachingAllocator::new_segment(std::uintptr_t address, std::size_t bytes, StreamHandle stream, BlockPool* pool,
                                       std::unique_ptr<ExpandableRange> expandable) {
  auto segment = std::make_unique<Segment>();
  segment->address = address;
  segment->bytes = bytes;
  segment->stream = stream;
  segment->pool = pool;
  segment->expandable = std::move(expandable);
  segment->index = segments_.size();
  segments_.push_back(std::move(segment));
  try {
    blocks_.begin(segments_.back().get());
  } catch (...) {
    segments_.pop_back();
    throw;
  }
  return segments_.back().get();
}

void CachingAllocator::delete_segment(Segment* segment) noexcept {
  std::swap(segments_[segment->index], segments_.back());
  segments_[segment->index]->index = segment->index;
  segments_.pop_back();
}

void CachingAllocator::add(StatArray& array, int pool, std::int64_t amount) noexcept {
  array[kAll].increase(amount);
  array[pool].increase(amount);
}

void CachingAllocator::subtract(StatArray& array, int pool, std::int64_t amount) noexcept {
  array[kAll].decrease(amount);
  array[pool].decrease(amount);
}

void CachingAllocator::change_reserved(BlockPool& pool, std::int64_t bytes) {
  reserved_bytes_ += static_cast<std::size_t>(bytes);
  StatArray* of_pool = nullptr;
  if (pool.owner != nullptr) {
    auto found =
        std::find_if(private_reserved_.begin(), private_reserved_.end(), [&](const auto& entry) { return entry.first == pool.owner->id; });
    if (found == private_reserved_.end()) found = private_reserved_.insert(found, {pool.owner->id, StatArray()});
    of_pool = &found->second;
  }
  if (bytes > 0) {
    add(stats_.reserved_bytes, stat_pool(pool), bytes);
    if (of_pool) add(*of_pool, stat_pool(pool), bytes);
  } else {
    subtract(stats_.reserved_bytes, stat_pool(pool), -bytes);
    if (of_pool) subtract(*of_pool, stat_pool(pool), -bytes);
  }
}

void CachingAllocator::record(Action action, std::uintptr_t address, std::size_t bytes, StreamHandle stream, const BlockPool* pool,
                              const Context& context) {
  if (!history_.enabled() && trackers_.empty()) return;
  const PoolId id = pool != nullptr && pool->owner != nullptr ? pool->owner->id : PoolId{0, 0};
  const bool is_free = action == Action::kFreeRequested || action == Action::kFreeCompleted;
  const bool keep = history_.keeps(is_free ? RecordContext::kAll : RecordContext::kAlloc);
  record_to_all({action, address, bytes, stream, wall_now_us(), id, keep ? context : Context(), thread_id(), nullptr, history_tags()});
}

void CachingAllocator::record_to_all(TraceEntry entry) {
  for (const auto& tracker : trackers_) tracker(entry);
  if (history_.enabled()) history_.add(std::move(entry));
}

void CachingAllocator::record_note(Action action, std::string note) {
  if (!history_.enabled() || note.empty()) return;
  history_.add({action, 0, 0, 0, wall_now_us(), {0, 0}, {}, thread_id(), std::make_shared<const std::string>(std::move(note)), nullptr});
}

// --- Settings and lookups -------------------------------------------------------------------

void CachingAllocator::apply_settings(const Settings& settings) {
  Lock lock(mutex_);
  if (history_.enabled()) record_note(Action::kSettings, settings_difference(settings_, settings));
  const bool fraction_given = settings.per_process_memory_fraction != settings_.per_process_memory_fraction;
  settings_ = settings;
  if (fraction_given) fraction_ = settings.per_process_memory_fraction;
  allowed_bytes_ = fraction_ < 1.0 ? static_cast<std::size_t>(fraction_ * static_cast<double>(total_bytes_)) : kUnlimitedBytes;
  collection_armed_ = allowed_bytes_ != kUnlimitedBytes && settings_.garbage_collection_threshold > 0;
  stats_.max_split_size = settings_.max_split_size_mb == kUnlimitedBytes ? -1 : static_cast<std::int64_t>(settings_.max_split_size_mb);
}

Status CachingAllocator::set_memory_fraction(double fraction) {
  if (!(fraction >= 0.0 && fraction <= 1.0)) {
    return {StatusCode::kInvalidArgument, "invalid fraction:" + std::to_string(fraction) + ". Please set within [0, 1]."};
  }
  Lock lock(mutex_);
  record_note(Action::kFraction, std::to_string(fraction));
  fraction_ = fraction;
  allowed_bytes_ = fraction < 1.0 ? static_cast<std::size_t>(fraction * static_cast<double>(total_bytes_)) : kUnlimitedBytes;
  collection_armed_ = allowed_bytes_ != kUnlimitedBytes && settings_.garbage_collection_threshold > 0;
  return {};
}

double CachingAllocator::memory_fraction() const {
  Lock lock(mutex_);
  return fraction_;
}

std::pair<void*, std::size_t> CachingAllocator::base_allocation(const void* ptr) const {
  Lock lock(mutex_);
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  for (const auto& segment : segments_) {
    if (address < segment->address || address >= segment->address + segment->bytes) continue;
    for (Block block = blocks_.first(*segment); block; block = block.next()) {
      if (address >= block.address() && address < block.end() && block.is_allocated()) {
        return {reinterpret_cast<void*>(block.address()), block.bytes()};
      }
    }
  }
  return {nullptr, 0};
}

std::pair<void*, std::size_t> CachingAllocator::driver_allocation(const void* ptr, bool* is_expandable) const {
  Lock lock(mutex_);
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  for (const auto& segment : segments_) {
    if (address < segment->address || address >= segment->address + segment->bytes) continue;
    if (is_expandable != nullptr) *is_expandable = segment->expandable != nullptr;
    std::uintptr_t start = 0;
    std::size_t bytes = 0;
    for (Block block = blocks_.first(*segment); block; block = block.next()) {
      if (!block.is_mapped()) {
        if (block.address() > address) break;
        bytes = 0;
        continue;
      }
      if (bytes == 0) start = block.address();
      bytes += block.bytes();
    }
    if (bytes == 0 || address < start) return {nullptr, 0};
    return {reinterpret_cast<void*>(start), bytes};
  }
  return {nullptr, 0};
}

bool CachingAllocator::owns(const void* ptr) const {
  Lock lock(mutex_);
  const Block block = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  return block && !block.is_available();
}

// --- Statistics and history -----------------------------------------------------------------

DeviceStats CachingAllocator::stats() const {
  Lock lock(mutex_);
  return stats_;
}

std::vector<std::pair<PoolId, StatArray>> CachingAllocator::private_pool_reserved_bytes() const {
  Lock lock(mutex_);
  return private_reserved_;
}

void CachingAllocator::reset_peak_stats() {
  Lock lock(mutex_);
  stats_.reset_peak();
  for (auto& [id, stats] : private_reserved_) {
    for (Stat& stat : stats) stat.reset_peak();
  }
}

void CachingAllocator::reset_accumulated_stats() {
  Lock lock(mutex_);
  stats_.reset_accumulated();
  for (auto& [id, stats] : private_reserved_) {
    for (Stat& stat : stats) stat.reset_accumulated();
  }
}

void CachingAllocator::start_history(const HistoryOptions& options, bool clear_old) {
  Lock lock(mutex_);
  history_.start(options, clear_old);
  may_capture_.store(options.capture != nullptr && options.when != RecordContext::kNever);
}

void CachingAllocator::stop_history() {
  Lock lock(mutex_);
  history_.stop();
  may_capture_.store(false);
}

// The capture itself runs under no lock: it may take the interpreter's.
Context CachingAllocator::capture_unlocked(RecordContext level) const {
  History options;
  {
    Lock lock(mutex_);
    if (!history_.enabled()) return {};
    options = history_.without_entries();
  }
  return options.capture(level);
}

std::vector<TraceEntry> CachingAllocator::history() const {
  Lock lock(mutex_);
  return history_.entries();
}

bool CachingAllocator::history_enabled() const {
  Lock lock(mutex_);
  return history_.enabled();
}

Context CachingAllocator::context_of(const void* ptr) const {
  Lock lock(mutex_);
  const Block block = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  const BlockExtra* extra = block && block.is_allocated() ? blocks_.extra(block) : nullptr;
  return extra != nullptr ? extra->context : Context();
}

void CachingAllocator::annotate(const void* ptr, std::string note) {
  Lock lock(mutex_);
  const Block block = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (!block || !block.is_allocated() || (!history_.enabled() && trackers_.empty())) return;
  const PrivatePool* owner = block.pool().owner;
  record_to_all({Action::kAnnotate,
                 block.address(),
                 blocks_.requested_bytes(block),
                 block.stream(),
                 wall_now_us(),
                 owner != nullptr ? owner->id : PoolId{0, 0},
                 {},
                 thread_id(),
                 std::make_shared<const std::string>(std::move(note)),
                 nullptr});
}

void CachingAllocator::on_trace(std::function<void(const TraceEntry&)> tracker) {
  Lock lock(mutex_);
  trackers_.push_back(std::move(tracker));
}

std::size_t CachingAllocator::largest_free_block_bytes() const {
  Lock lock(mutex_);
  std::size_t largest = 0;
  for (const auto& segment : segments_) {
    for (Block block = blocks_.first(*segment); block; block = block.next()) {
      if (block.is_mapped() && block.is_available()) largest = std::max(largest, block.bytes());
    }
  }
  return largest;
}

std::vector<ExpandableSize> CachingAllocator::expandable_sizes() const {
  Lock lock(mutex_);
  std::vector<ExpandableSize> sizes;
  for (const auto& segment : segments_) {
    if (segment->expandable == nullptr) continue;
    sizes.push_back(
        {segment->stream, segment->pool->is_small, segment->expandable->mapped_page_count() * segment->expandable->page_bytes()});
  }
  return sizes;
}

void CachingAllocator::on_memory_pressure(std::function<bool()> callback) {
  Lock lock(mutex_);
  pressure_callbacks_.push_back(std::move(callback));
}

void CachingAllocator::on_oom(std::function<void(const OomReport&)> observer) {
  Lock lock(mutex_);
  oom_observers_.push_back(std::move(observer));
}

void CachingAllocator::on_rejection(std::function<void(const OomReport&)> observer) {
  Lock lock(mutex_);
  rejection_observers_.push_back(std::move(observer));
}

}  // namespace mybackend::caching
