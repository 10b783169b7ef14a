// Frees, and giving cached memory back to the driver.
#include <algorithm>

#include "core/caching/expandable_range.h"
#include "core/caching/request.h"

namespace mybackend::caching {

FreeResult CachingAllocator::free(void* ptr, std::size_t* requested_bytes) noexcept {
  Context context = capture_context(RecordContext::kAll);
  Lock lock(mutex_);
  const Block block = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (!block || !block.is_allocated()) return FreeResult::kUnknownPointer;
  const std::size_t requested = blocks_.requested_bytes(block), bytes = block.bytes();
  if (requested_bytes != nullptr) *requested_bytes = requested;
  BlockPool& pool = block.pool();
  const int which = stat_pool(pool);
  subtract(stats_.allocation, which, 1);
  subtract(stats_.allocated_bytes, which, static_cast<std::int64_t>(bytes));
  record(Action::kFreeRequested, block.address(), requested, block.stream(), &pool, context);
  if (bytes >= settings_.max_split_size_mb) stats_.oversize_allocations.decrease(1);
  block.set_state(Block::kWaiting);
  const BlockExtra* extra = blocks_.extra(block);
  if (extra == nullptr || extra->stream_uses.empty()) {
    put_back(block, context);
  } else if (capture_count_ > 0) {
    mark_uses(block);
    event_waiters_.push_back(block.address());  // a capture must not record events of its own accord
  } else if (!record_events(block)) {
    put_back(block, context);
  }
  return FreeResult::kFreed;
}

// The end of a free: the block joins its free neighbours and the free set.
void CachingAllocator::put_back(Block block, const Context& context) {
  BlockPool& pool = block.pool();
  const StreamHandle stream = block.stream();
  const int which = stat_pool(pool);
  const FreeSet::Key freed = key_of(block);
  const std::size_t requested_bytes = blocks_.requested_bytes(block);
  record(Action::kFreeCompleted, freed.address, requested_bytes, stream, &pool, context);
  blocks_.drop_extra(block);
  block.set_state(Block::kFree);

  std::int64_t split_blocks = 0, split_bytes = 0;  // net change
  const auto is_mergeable = [](Block neighbour) { return neighbour && neighbour.is_available() && neighbour.is_mapped(); };
  Block previous = block.previous();
  const Block next = block.next();
  const bool joins_previous = is_mergeable(previous), joins_next = is_mergeable(next);
  FreeSet::Key result = freed;
  FreeSet::Key place;  // the result takes the place of one absorbed neighbour in the free set
  if (joins_next) {
    place = key_of(next);
    split_blocks -= 1;
    split_bytes -= static_cast<std::int64_t>(place.bytes);
    result.bytes += place.bytes;
    if (joins_previous) pool.free.erase(stream, place);
    blocks_.end(next);
  }
  if (joins_previous) {
    place = {freed.address - previous.address(), previous.address()};
    split_blocks -= 1;
    split_bytes -= static_cast<std::int64_t>(place.bytes);
    result = {place.bytes + result.bytes, place.address};
    blocks_.end(block);
    previous = blocks_.set_requested_bytes(previous, requested_bytes);
  }
  if (place)
    pool.free.replace(stream, place, result);
  else
    pool.free.insert(stream, result);
  const Block merged = joins_previous ? previous : block;
  if (merged.is_split()) {
    split_blocks += 1;
    split_bytes += static_cast<std::int64_t>(result.bytes);
  }
  if (!merged.is_expandable()) {
    if (split_blocks > 0) add(stats_.inactive_split, which, split_blocks);
    if (split_blocks < 0) subtract(stats_.inactive_split, which, -split_blocks);
    if (split_bytes > 0) add(stats_.inactive_split_bytes, which, split_bytes);
    if (split_bytes < 0) subtract(stats_.inactive_split_bytes, which, -split_bytes);
  }
  subtract(stats_.active, which, 1);
  subtract(stats_.active_bytes, which, static_cast<std::int64_t>(freed.bytes));
  subtract(stats_.requested_bytes, which, static_cast<std::int64_t>(requested_bytes));
}

// Joins a block that is in no set with its neighbours that are free and in the same mapped
// state, and takes them out of their sets. Returns the result, in no set.
Block CachingAllocator::merge_neighbours(Block block) {
  BlockPool& pool = block.pool();
  const StreamHandle stream = block.stream();
  const auto take = [&](Block neighbour) {
    if (!neighbour || !neighbour.is_available() || neighbour.is_mapped() != block.is_mapped()) return false;
    if (neighbour.is_mapped())
      pool.free.erase(stream, key_of(neighbour));
    else
      pool.unmapped.erase({stream, neighbour.address()});
    return true;
  };
  if (const Block next = block.next(); take(next)) blocks_.end(next);
  if (const Block previous = block.previous(); take(previous)) {
    const std::size_t requested_bytes = blocks_.requested_bytes(block);
    blocks_.end(block);
    return blocks_.set_requested_bytes(previous, requested_bytes);
  }
  return block;
}

// --- Back to the driver -----------------------------------------------------------------------

// A segment's memory, to where it came from.
Status CachingAllocator::give_back(const BlockPool& pool, void* ptr, std::size_t bytes, StreamHandle stream) {
  if (pool.owner == nullptr || pool.owner->source == nullptr) return driver_->memory_free(device_, ptr);
  pool.owner->source->free(ptr, bytes, stream);
  return {};
}

// `block` is a whole segment, free.
void CachingAllocator::release_block(Block block, const Context& context) {
  Segment& segment = block.segment();
  BlockPool& pool = *segment.pool;
  const FreeSet::Key key = key_of(block);
  if (!give_back(pool, reinterpret_cast<void*>(key.address), key.bytes, segment.stream).ok()) return;  // stays cached
  record(Action::kSegmentFree, key.address, key.bytes, segment.stream, &pool, context);
  if (pool.owner != nullptr) --pool.owner->segment_count;
  change_reserved(pool, -static_cast<std::int64_t>(key.bytes));
  subtract(stats_.segment, stat_pool(pool), 1);
  ++stats_.num_device_free;
  if (key.bytes >= settings_.max_split_size_mb) stats_.oversize_segments.decrease(1);
  pool.free.erase(segment.stream, key);
  blocks_.end(block);
  delete_segment(&segment);
}

void CachingAllocator::release_pool_blocks(BlockPool& pool, const Context& context) {
  std::vector<std::uintptr_t> expandable;
  for (const FreeSet::Member& member : pool.free.members()) {
    const Block block = blocks_.find(member.key.address);
    if (block.is_expandable())
      expandable.push_back(member.key.address);
    else if (!block.is_split())
      release_block(block, context);
  }
  for (std::uintptr_t address : expandable) {
    const Block left = unmap_block(blocks_.find(address), context);
    if (!left.is_split() && !left.is_mapped()) drop_expandable_segment(left);
  }
  for (auto& segment : segments_) {
    if (segment->pool == &pool && segment->expandable != nullptr) segment->expandable->release_idle_pages();
  }
}

void CachingAllocator::empty_cache(PoolId pool) {
  Context context = capture_context(RecordContext::kAll);
  Lock lock(mutex_);
  const std::size_t before = reserved_bytes_;
  (void)release_cached_blocks(pool, context);
  record(Action::kEmptyCache, 0, before - reserved_bytes_, 0, nullptr, context);
}

bool CachingAllocator::release_cached_blocks(PoolId only, const Context& context) {
  const bool everything = only == PoolId{0, 0};
  if (everything) {
    synchronize_events(context, nullptr);
    release_pool_blocks(large_, context);
    release_pool_blocks(small_, context);
  }
  for (PoolId id : freeable_pools_.keys()) {
    if (!everything && id != only) continue;
    PrivatePool* pool = find_pool(id);
    if (!everything) synchronize_events(context, pool);
    release_pool_blocks(pool->small, context);
    release_pool_blocks(pool->large, context);
    const bool is_used = std::any_of(segments_.begin(), segments_.end(), [&](const auto& s) { return s->pool->owner == pool; });
    if (pool->segment_count == 0 && !is_used) {
      freeable_pools_.erase(id);
      fallback_pools_.erase(id);
      for (auto& [known, stats] : private_reserved_) {
        if (known != id) continue;
        for (Stat& stat : stats) stat.current = 0;
      }
      std::erase_if(private_pools_, [&](const auto& p) { return p.get() == pool; });
    }
  }
  return true;
}

// Only with a split limit: one free block that is large enough, or the largest oversize blocks
// of the stream until they are enough together. False when they are not.
bool CachingAllocator::release_available_blocks(const Request& r) {
  const std::size_t max_split = settings_.max_split_size_mb;
  if (max_split == kUnlimitedBytes) return false;
  BlockPool& pool = *r.pool;
  const std::size_t wanted = std::max(r.bytes, max_split);
  FreeSet::Key enough = pool.free.lower_bound(r.stream, wanted);
  while (enough && blocks_.find(enough.address).is_expandable()) enough = pool.free.after(r.stream, enough);
  if (enough && !blocks_.find(enough.address).is_split()) {
    release_block(blocks_.find(enough.address), r.context);
    return true;
  }
  std::size_t released = 0;
  FreeSet::Key key = pool.free.below(r.stream, wanted);
  while (key && released < wanted && key.bytes >= max_split) {
    const FreeSet::Key smaller = pool.free.before(r.stream, key);
    const Block block = blocks_.find(key.address);
    if (!block.is_expandable() && !block.is_split()) {
      released += key.bytes;
      release_block(block, r.context);
    }
    key = smaller;
  }
  return released >= wanted;
}

// Releases unsplit blocks of the default large pool, all of at least average age in one pass, until
// what is reserved is back at the threshold.
void CachingAllocator::collect_garbage(const Context& context) {
  const auto threshold = static_cast<std::size_t>(settings_.garbage_collection_threshold * static_cast<double>(allowed_bytes_));
  if (reserved_bytes_ <= threshold) return;
  const std::size_t target = reserved_bytes_ - threshold;
  std::size_t reclaimed = 0;
  std::int64_t total_age = 0, count = 0;
  for (const FreeSet::Member& member : large_.free.members()) {
    if (blocks_.find(member.key.address).is_split()) continue;
    total_age += large_.free.age(member.key.address);
    ++count;
  }
  bool progress = true;
  while (reclaimed < target && progress && count > 0) {
    progress = false;
    const double average = static_cast<double>(total_age) / static_cast<double>(count);
    for (const FreeSet::Member& member : large_.free.members()) {
      const Block block = blocks_.find(member.key.address);
      const std::int64_t age = large_.free.age(member.key.address);
      if (block.is_split() || block.is_expandable() || static_cast<double>(age) < average) continue;
      progress = true;
      reclaimed += member.key.bytes;
      total_age -= age;
      --count;
      release_block(block, context);
    }
  }
}

}  // namespace mybackend::caching
