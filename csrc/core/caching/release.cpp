// Frees, and giving cached memory back to the driver.
#include <algorithm>

#include "core/caching/expandable_range.h"
#include "core/caching/request.h"

namespace mybackend::caching {

FreeResult CachingAllocator::free(void* ptr, std::size_t* requested_bytes) noexcept {
  Context context = capture_context(RecordContext::kAll);
  Lock lock(mutex_);
  Block* block = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (block == nullptr || !block->allocated) return FreeResult::kUnknownPointer;
  if (requested_bytes != nullptr) *requested_bytes = block->requested_bytes;
  block->allocated = false;
  BlockPool& pool = block->pool();
  const int which = stat_pool(pool);
  subtract(stats_.allocation, which, 1);
  subtract(stats_.allocated_bytes, which, static_cast<std::int64_t>(block->bytes));
  record(Action::kFreeRequested, block->address, block->requested_bytes, block->stream(), &pool, context);
  if (block->bytes >= settings_.max_split_size_mb) stats_.oversize_allocations.decrease(1);
  if (block->extra == nullptr || block->extra->stream_uses.empty()) {
    put_back(block, context);
  } else if (capture_count_ > 0) {
    mark_uses(block);
    event_waiters_.push_back(block);  // a capture must not record events of its own accord
  } else {
    record_events(block);
    if (block->extra->event_count == 0) put_back(block, context);
  }
  return FreeResult::kFreed;
}

// The end of a free: the block joins its free neighbours and the free set.
void CachingAllocator::put_back(Block* block, const Context& context) {
  BlockPool& pool = block->pool();
  record(Action::kFreeCompleted, block->address, block->requested_bytes, block->stream(), &pool, context);
  const int which = stat_pool(pool);
  const auto freed_bytes = static_cast<std::int64_t>(block->bytes);
  const std::size_t requested_bytes = block->requested_bytes;
  block->extra.reset();

  std::int64_t split_blocks = 0, split_bytes = 0;  // net change
  const auto mergeable = [](const Block* neighbour) { return neighbour != nullptr && neighbour->is_available() && neighbour->mapped; };
  Block* const previous = mergeable(block->previous) ? block->previous : nullptr;
  Block* const next = mergeable(block->next) ? block->next : nullptr;
  // The result takes the place of one absorbed neighbour in the free set.
  FreeSet::Key place{0, 0};
  if (next != nullptr) {
    split_blocks -= 1;
    split_bytes -= static_cast<std::int64_t>(next->bytes);
    if (previous != nullptr)
      pool.free.erase(next);
    else
      place = FreeSet::key(next);
    absorb_next(block);
  }
  if (previous != nullptr) {
    split_blocks -= 1;
    split_bytes -= static_cast<std::int64_t>(previous->bytes);
    place = FreeSet::key(previous);
    absorb_next(previous);
    block = previous;
    block->requested_bytes = requested_bytes;
  }
  if (place.bytes != 0)
    replace_free(place, block);
  else
    insert_free(block);
  if (block->is_split()) {
    split_blocks += 1;
    split_bytes += static_cast<std::int64_t>(block->bytes);
  }
  if (!block->is_expandable()) {
    if (split_blocks > 0) add(stats_.inactive_split, which, split_blocks);
    if (split_blocks < 0) subtract(stats_.inactive_split, which, -split_blocks);
    if (split_bytes > 0) add(stats_.inactive_split_bytes, which, split_bytes);
    if (split_bytes < 0) subtract(stats_.inactive_split_bytes, which, -split_bytes);
  }
  subtract(stats_.active, which, 1);
  subtract(stats_.active_bytes, which, freed_bytes);
  subtract(stats_.requested_bytes, which, static_cast<std::int64_t>(requested_bytes));
}

// The block's bytes grow by those of the next one, which is in no set any more and ends.
void CachingAllocator::absorb_next(Block* block) noexcept {
  Block* from = block->next;
  block->bytes += from->bytes;
  block->next = from->next;
  if (block->next != nullptr) block->next->previous = block;
  blocks_.destroy(from);
}

// Joins a block that is in no set with its neighbours that are free and in the same mapped
// state, and takes them out of their sets. Returns the result, in no set.
Block* CachingAllocator::merge_neighbours(Block* block) noexcept {
  const auto take = [&](Block* neighbour) {
    if (neighbour == nullptr || !neighbour->is_available() || neighbour->mapped != block->mapped) return false;
    if (neighbour->mapped)
      neighbour->pool().free.erase(neighbour);
    else
      neighbour->pool().unmapped.erase(neighbour);
    return true;
  };
  if (take(block->next)) absorb_next(block);
  if (Block* previous = block->previous; take(previous)) {
    previous->requested_bytes = block->requested_bytes;
    absorb_next(previous);
    return previous;
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
void CachingAllocator::release_block(Block* block, const Context& context) {
  BlockPool& pool = block->pool();
  Segment* segment = block->segment;
  if (!give_back(pool, reinterpret_cast<void*>(block->address), block->bytes, block->stream()).ok()) return;  // stays cached
  record(Action::kSegmentFree, block->address, block->bytes, block->stream(), &pool, context);
  if (pool.owner != nullptr) --pool.owner->segment_count;
  change_reserved(pool, -static_cast<std::int64_t>(block->bytes));
  subtract(stats_.segment, stat_pool(pool), 1);
  ++stats_.num_device_free;
  if (block->bytes >= settings_.max_split_size_mb) stats_.oversize_segments.decrease(1);
  pool.free.erase(block);
  blocks_.destroy(block);
  delete_segment(segment);
}

void CachingAllocator::release_pool_blocks(BlockPool& pool, const Context& context) {
  std::vector<Block*> expandable;
  for (Block* block : pool.free.blocks()) {
    if (block->is_expandable())
      expandable.push_back(block);
    else if (!block->is_split())
      release_block(block, context);
  }
  for (Block* block : expandable) {
    Block* left = unmap_block(block, context);
    if (!left->is_split() && !left->mapped) drop_expandable_segment(left);
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
  Block* enough = pool.free.lower_bound(r.stream, wanted);
  while (enough != nullptr && enough->is_expandable()) enough = pool.free.after(enough);
  if (enough != nullptr && !enough->is_split()) {
    release_block(enough, r.context);
    return true;
  }
  std::size_t released = 0;
  Block* block = pool.free.below(r.stream, wanted);
  while (block != nullptr && released < wanted && block->bytes >= max_split) {
    Block* smaller = pool.free.before(block);
    if (!block->is_expandable() && !block->is_split()) {
      released += block->bytes;
      release_block(block, r.context);
    }
    block = smaller;
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
  for (const Block* block : large_.free.blocks()) {
    if (block->is_split()) continue;
    total_age += block->age();
    ++count;
  }
  bool progress = true;
  while (reclaimed < target && progress && count > 0) {
    progress = false;
    const double average = static_cast<double>(total_age) / static_cast<double>(count);
    for (Block* block : large_.free.blocks()) {
      if (block->is_split() || block->is_expandable() || static_cast<double>(block->age()) < average) continue;
      progress = true;
      reclaimed += block->bytes;
      total_age -= block->age();
      --count;
      release_block(block, context);
    }
  }
}

}  // namespace mybackend::caching
