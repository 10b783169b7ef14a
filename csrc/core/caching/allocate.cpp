// The way of an allocation: free blocks first, then the driver, then what can be released.
#include <algorithm>
#include <exception>

#include "core/caching/expandable_range.h"
#include "core/caching/request.h"
#include "core/caching/sizing.h"

namespace mybackend::caching {

void* CachingAllocator::allocate(std::size_t bytes, StreamHandle stream, std::unique_ptr<OomReport>* report) {
  if (bytes == 0) return nullptr;
  Context context = capture_context(RecordContext::kState);
  Lock lock(mutex_);
  if (bytes >= kMaxRequestBytes) {
    Request r(bytes, stream, &large_, {});
    r.driver_status = {StatusCode::kOutOfMemory, "more than 1EB was requested"};
    if (report != nullptr) fill_report(r, (*report = std::make_unique<OomReport>()).get());
    return nullptr;
  }
  // A graph under capture must not query events: frees that wait for some stay as they are.
  if (capture_count_ == 0 && (!pending_events_.empty() || !event_waiters_.empty())) process_events(context);
  if (capture_count_ > 0 && !event_waiters_.empty()) put_back_passed(stream, context);

  const std::size_t rounded = round_request(bytes, settings_.roundup_power2_divisions);
  Request r(bytes, stream, &pool_for(rounded, stream), std::move(context));
  r.bytes = rounded;
  r.segment_bytes = segment_bytes_for(rounded, settings_.large_segment_size_mb);

  bool found = take_free_block(r);
  if (!found && !pressure_callbacks_.empty()) found = run_pressure_callbacks(lock) && take_free_block(r);
  if (!found) {
    if (collection_armed_) collect_garbage(r.context);
    found = add_segment(r, false, lock);
    if (!found && !r.fails_at_once) found = take_from_fallback_pools(r);
    const auto may_retry = [&] { return !found && !r.fails_at_once; };
    if (may_retry()) found = release_available_blocks(r) && add_segment(r, false, lock);
    if (may_retry()) found = release_cached_blocks({0, 0}, r.context) && add_segment(r, true, lock);
  }
  if (found) return hand_out(r);

  auto filled = std::make_unique<OomReport>();
  fill_report(r, filled.get());
  // As in PyTorch, neither a request that was not even tried nor a broken driver counts as out of
  // memory.
  if (!r.fails_at_once) {
    record(Action::kOom, filled->free_bytes, r.bytes, stream, r.pool, r.context);
    ++stats_.num_ooms;
    const auto observers = oom_observers_;
    lock.unlock();
    for (const auto& observer : observers) observer(*filled);
  } else if (r.driver_status.code() == StatusCode::kOutOfMemory) {
    const auto observers = rejection_observers_;
    lock.unlock();
    for (const auto& observer : observers) observer(*filled);
  }
  if (report != nullptr) *report = std::move(filled);
  return nullptr;
}

BlockPool& CachingAllocator::pool_for(std::size_t rounded_bytes, StreamHandle stream) {
  for (auto active = active_pools_.rbegin(); active != active_pools_.rend(); ++active) {
    if (active->filter(stream)) return is_small(rounded_bytes) ? active->pool->small : active->pool->large;
  }
  return is_small(rounded_bytes) ? small_ : large_;
}

// Best fit: the smallest free block of the stream that is large enough.
bool CachingAllocator::take_free_block(Request& r) {
  BlockPool& pool = *r.pool;
  if (collection_armed_) pool.free.tick();
  FreeSet::Key best = pool.free.lower_bound(r.stream, r.bytes);
  if (!best) return false;
  Block block = blocks_.find(best.address);
  if (block.is_expandable()) {
    block = best_fit_past_expandable(r, best, block);
    if (!block) return false;
    best = key_of(block);
  }
  const std::size_t max_split = settings_.max_split_size_mb;
  if (r.bytes < max_split && best.bytes >= max_split) return false;
  // A larger segment size raises the default of the rounding; a given one is never below it.
  const std::size_t rounding = std::max(settings_.max_non_split_rounding_mb, settings_.large_segment_size_mb);
  if (r.bytes >= max_split && best.bytes >= r.bytes + rounding) return false;
  r.block = block;
  r.found = best;
  return true;
}

// The best fit when the smallest block, `block` with the key `best`, is of an expandable segment.
Block CachingAllocator::best_fit_past_expandable(const Request& r, FreeSet::Key best, Block block) const {
  const FreeSet& free = r.pool->free;
  const auto go_on = [&] {
    best = free.after(r.stream, best);
    block = best ? blocks_.find(best.address) : Block();
  };
  if (!settings_.expandable_segments) {
    while (block && block.is_expandable()) go_on();
    return block;
  }
  // A block at the end of the mapped part counts with what it can grow to, so that the end of a
  // segment is not used up by requests that fit elsewhere.
  const auto reach = [](Block b) {
    const Block next = b.next();
    return next && !next.is_mapped() ? next.end() - b.address() : b.bytes();
  };
  while (block.is_expandable()) {
    const FreeSet::Key next = free.after(r.stream, best);
    if (!next || reach(blocks_.find(next.address)) >= reach(block)) break;
    go_on();
  }
  return block;
}

bool CachingAllocator::take_from_fallback_pools(Request& r) {
  if (r.pool->owner != nullptr) return false;
  for (PoolId id : fallback_pools_.keys()) {
    PrivatePool* pool = find_pool(id);
    if (pool == nullptr) continue;
    BlockPool* const own = std::exchange(r.pool, is_small(r.bytes) ? &pool->small : &pool->large);
    if (take_free_block(r)) return true;
    r.pool = own;
  }
  return false;
}

namespace {

thread_local bool t_in_segment_source = false;

Status allocate_from(const SegmentSource& source, std::size_t bytes, StreamHandle stream, void** out) {
  t_in_segment_source = true;
  Status status;
  try {
    *out = source.allocate(bytes, stream);
    if (*out == nullptr) status = {StatusCode::kOutOfMemory, "the memory pool's own allocator has no memory"};
  } catch (const std::exception& error) {
    status = {StatusCode::kFailed, std::string("the memory pool's own allocator: ") + error.what()};
  }
  t_in_segment_source = false;
  return status;
}

}  // namespace

bool in_segment_source() noexcept {
  return t_in_segment_source;
}

bool CachingAllocator::add_segment(Request& r, bool is_retry, Lock& lock) {
  if (is_retry) ++stats_.num_alloc_retries;
  r.refused_by_limit = false;
  r.driver_status = {};
  if (allowed_bytes_ != kUnlimitedBytes && reserved_bytes_ + r.segment_bytes > allowed_bytes_) {
    r.refused_by_limit = true;
    return false;
  }
  // The configured fraction (by default all) holds here even when a program has set another one since.
  if (settings_.throw_on_cudamalloc_oom &&
      reserved_bytes_ + r.segment_bytes >
          static_cast<std::size_t>(settings_.per_process_memory_fraction * static_cast<double>(total_bytes_))) {
    r.fails_at_once = true;
    ++stats_.num_oom_rejections;
    r.driver_status = {StatusCode::kOutOfMemory, "it would exceed per_process_memory_fraction, and throw_on_cudamalloc_oom is set"};
    return false;
  }
  const std::shared_ptr<const SegmentSource> source = r.pool->owner != nullptr ? r.pool->owner->source : nullptr;
  if (settings_.expandable_segments && source == nullptr) {
    r.block = grow_expandable(r);
    if (!r.block && r.driver_status.ok()) r.driver_status = {StatusCode::kOutOfMemory, "cannot map pages"};
    r.fails_at_once = !r.block && r.driver_status.code() != StatusCode::kOutOfMemory;
    return static_cast<bool>(r.block);
  }
  void* ptr = nullptr;
  if (source != nullptr) {
    lock.unlock();  // a program's function: it may wait for whoever waits for this allocator
    r.driver_status = allocate_from(*source, r.segment_bytes, r.stream, &ptr);
    lock.lock();
  } else if (settings_.release_lock_on_cudamalloc) {
    lock.unlock();
    r.driver_status = driver_->memory_allocate(device_, r.segment_bytes, &ptr);
    lock.lock();
  } else {
    r.driver_status = driver_->memory_allocate(device_, r.segment_bytes, &ptr);
  }
  if (!r.driver_status.ok()) {
    r.fails_at_once = r.driver_status.code() != StatusCode::kOutOfMemory;
    return false;
  }
  Segment* segment = nullptr;
  try {
    segment = new_segment(reinterpret_cast<std::uintptr_t>(ptr), r.segment_bytes, r.stream, r.pool, nullptr);
  } catch (...) {
    (void)give_back(*r.pool, ptr, r.segment_bytes, r.stream);
    throw;
  }
  if (history_.enabled()) segment->context = r.context;
  if (r.pool->owner != nullptr) ++r.pool->owner->segment_count;
  change_reserved(*r.pool, static_cast<std::int64_t>(r.segment_bytes));
  add(stats_.segment, stat_pool(*r.pool), 1);
  if (r.segment_bytes >= settings_.max_split_size_mb) stats_.oversize_segments.increase(1);
  ++stats_.num_device_alloc;
  record(Action::kSegmentAlloc, segment->address, segment->bytes, r.stream, r.pool, r.context);
  r.block = blocks_.first(*segment);
  return true;
}

bool CachingAllocator::should_split(const BlockPool& pool, std::size_t block_bytes, std::size_t bytes) const {
  if (pool.owner != nullptr && pool.owner->no_split) return false;
  const std::size_t rest = block_bytes - bytes;
  if (pool.is_small || settings_.expandable_segments) return rest >= kMinBlockBytes;
  return bytes < settings_.max_split_size_mb && rest > kSmallBytes;
}

// Serves r from r.block.
void* CachingAllocator::hand_out(Request& r) {
  Block block = r.block;
  // Not from the block's record: that may still be on its way from memory.
  BlockPool& pool = *r.pool;
  const StreamHandle stream = r.stream;
  const int which = stat_pool(pool);
  const FreeSet::Key found = r.found ? r.found : key_of(block);
  const bool was_split = block.is_split();
  const bool counts_as_split = !block.is_expandable();  // whole pages of those can be given back
  std::size_t block_bytes = found.bytes;
  if (should_split(pool, found.bytes, r.bytes)) {
    Block kept = block;  // `block` itself stays in registers
    blocks_.divide_alike(kept, r.bytes);
    block = kept;
    block_bytes = r.bytes;
    const FreeSet::Key rest_key{found.bytes - r.bytes, found.address + r.bytes};
    if (r.found)
      pool.free.replace(stream, found, rest_key);
    else
      pool.free.insert(stream, rest_key);
    if (counts_as_split) {
      if (was_split) {
        subtract(stats_.inactive_split_bytes, which, static_cast<std::int64_t>(block_bytes));
      } else {
        add(stats_.inactive_split_bytes, which, static_cast<std::int64_t>(rest_key.bytes));
        add(stats_.inactive_split, which, 1);
      }
    }
  } else {
    if (r.found) pool.free.erase(stream, found);
    if (was_split && counts_as_split) {
      subtract(stats_.inactive_split_bytes, which, static_cast<std::int64_t>(block_bytes));
      subtract(stats_.inactive_split, which, 1);
    }
  }
  block.set_state(Block::kAllocated);
  block = blocks_.set_requested_bytes(block, r.requested_bytes);
  const auto bytes = static_cast<std::int64_t>(block_bytes);
  add(stats_.allocation, which, 1);
  add(stats_.allocated_bytes, which, bytes);
  add(stats_.active, which, 1);
  add(stats_.active_bytes, which, bytes);
  add(stats_.requested_bytes, which, static_cast<std::int64_t>(r.requested_bytes));
  if (block_bytes >= settings_.max_split_size_mb) stats_.oversize_allocations.increase(1);
  if (history_.enabled() || !trackers_.empty()) {
    if (Block copy = block; r.context) blocks_.need_extra(copy).context = r.context;
    record(Action::kAlloc, found.address, r.requested_bytes, stream, &pool, r.context);
  }
  return reinterpret_cast<void*>(found.address);
}

bool CachingAllocator::run_pressure_callbacks(Lock& lock) {
  const auto callbacks = pressure_callbacks_;
  lock.unlock();
  bool freed = false;
  for (const auto& callback : callbacks) freed = callback() || freed;
  lock.lock();
  return freed;
}

void CachingAllocator::fill_report(const Request& r, OomReport* report) {
  MemoryInfo info;
  (void)driver_->memory_info(device_, &info);
  report->driver_name = driver_->name();
  report->device = device_;
  report->requested_bytes = r.requested_bytes;
  report->rounded_bytes = r.bytes;
  report->segment_bytes = r.segment_bytes;
  report->free_bytes = info.free_bytes;
  report->total_bytes = info.total_bytes;
  report->limit_bytes = allowed_bytes_;
  report->allocated_bytes = static_cast<std::size_t>(stats_.allocated_bytes[kAll].current);
  report->reserved_bytes = reserved_bytes_;
  report->pending_event_bytes = static_cast<std::size_t>(stats_.active_bytes[kAll].current - stats_.allocated_bytes[kAll].current);
  report->stream = r.stream;
  report->driver_message = r.driver_status.message();
  report->driver_failed = !r.refused_by_limit && !r.driver_status.ok() && r.driver_status.code() != StatusCode::kOutOfMemory;
  for (const auto& segment : segments_) {
    for (Block block = blocks_.first(*segment); block; block = block.next()) {
      if (!block.is_mapped() || !block.is_available()) continue;
      if (segment->pool == r.pool && segment->stream == r.stream) {
        report->cached_same_stream_bytes += block.bytes();
        report->largest_same_stream_bytes = std::max(report->largest_same_stream_bytes, block.bytes());
      } else if (segment->pool->owner != nullptr) {
        report->private_pool_free_bytes += block.bytes();
      } else if (segment->stream != r.stream) {
        report->cached_other_streams_bytes += block.bytes();
      }
    }
  }
}

}  // namespace mybackend::caching
