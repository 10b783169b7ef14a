// Expandable segments: free blocks that grow by mapping pages behind them.
#include <algorithm>
#include <utility>

#include "core/caching/expandable_range.h"
#include "core/caching/request.h"
#include "core/caching/sizing.h"

namespace mybackend::caching {

// The lowest unmapped block of the stream behind which (or at whose free predecessor) there
// is enough contiguous space, mapped or not; else the one block of a new segment.
Block* CachingAllocator::find_expandable_space(const Request& r) {
  auto room_from = [&](const Block* block) {
    std::size_t room = 0;
    for (; block != nullptr && block->is_available() && room < r.bytes; block = block->next) room += block->bytes;
    return room >= r.bytes;
  };
  BlockPool& pool = *r.pool;
  for (auto it = pool.unmapped.lower_bound(r.stream); it != pool.unmapped.end() && (*it)->stream() == r.stream; ++it) {
    Block* start = *it;
    if (start->previous != nullptr && start->previous->is_available()) start = start->previous;
    if (room_from(start)) return start;
  }
  std::unique_ptr<ExpandableRange> range;
  const std::size_t page_bytes = pool.is_small ? kSmallSegmentBytes : settings_.large_segment_size_mb;
  Status status = ExpandableRange::create(driver_, device_, page_bytes, &range);
  if (!status.ok()) {
    const_cast<Request&>(r).driver_status = status;
    return nullptr;
  }
  Segment* segment = new_segment(range->address(), range->bytes(), r.stream, &pool);
  segment->expandable = std::move(range);
  segment->first->mapped = false;
  pool.unmapped.insert(segment->first);
  return segment->first;
}

// Maps the first `bytes` of an unmapped block, rounded up to pages, and merges the result with
// its mapped neighbours into one free block. Returns that, or nullptr when it cannot be mapped:
// then r.driver_status says why.
Block* CachingAllocator::map_block(Block* block, std::size_t bytes, Request& r) {
  const Context& context = r.context;
  AddressSpan mapped;
  r.driver_status = block->segment->expandable->map({block->address, bytes}, &mapped);
  if (!r.driver_status.ok()) return nullptr;
  BlockPool& pool = block->pool();
  pool.unmapped.erase(block);
  if (mapped.bytes < block->bytes) pool.unmapped.insert(split(block, mapped.bytes));
  block->mapped = true;
  block = merge_neighbours(block);
  insert_free(block);
  if (pool.owner != nullptr) pool.owner->segment_count += 1;
  change_reserved(pool, static_cast<std::int64_t>(mapped.bytes));
  ++stats_.num_device_alloc;
  if (history_.enabled() || !trackers_.empty()) {
    if (!block->segment->context) block->segment->context = context;
    record(Action::kSegmentMap, mapped.address, mapped.bytes, block->stream(), &pool, context);
  }
  return block;
}

Block* CachingAllocator::grow_expandable(Request& r) {
  Block* block = find_expandable_space(r);
  if (block == nullptr) return nullptr;
  if (!block->mapped) block = map_block(block, std::min(block->bytes, r.bytes), r);
  // A failure keeps what was mapped so far: it is free and merged.
  while (block != nullptr && block->bytes < r.bytes) {
    if (block->next == nullptr) return nullptr;  // larger than the whole range, so than the device
    block = map_block(block->next, std::min(r.bytes - block->bytes, block->next->bytes), r);
  }
  if (block == nullptr) return nullptr;
  r.pool->free.erase(block);
  return block;
}

// Gives back the pages that lie wholly inside a free block. What remains at its ends stays
// free; the hole becomes an unmapped block, which is returned (the block itself when no page
// could be given back).
Block* CachingAllocator::unmap_block(Block* block, const Context& context) {
  BlockPool& pool = block->pool();
  AddressSpan unmapped;
  (void)block->segment->expandable->unmap({block->address, block->bytes}, block->stream(), &unmapped);
  if (unmapped.bytes == 0) return block;
  pool.free.erase(block);
  const std::size_t before_bytes = unmapped.address - block->address;
  if (before_bytes > 0) {
    Block* before = block;
    block = split(before, before_bytes);
    block->requested_bytes = std::exchange(before->requested_bytes, 0);
    insert_free(before);
  }
  if (unmapped.bytes < block->bytes) insert_free(split(block, unmapped.bytes));
  block->mapped = false;
  block = merge_neighbours(block);
  pool.unmapped.insert(block);
  if (pool.owner != nullptr) pool.owner->segment_count -= 1;
  change_reserved(pool, -static_cast<std::int64_t>(unmapped.bytes));
  ++stats_.num_device_free;
  record(Action::kSegmentUnmap, unmapped.address, unmapped.bytes, block->stream(), &pool, context);
  return block;
}

void CachingAllocator::drop_expandable_segment(Block* block) {
  block->pool().unmapped.erase(block);
  Segment* segment = block->segment;
  blocks_.destroy(block);
  delete_segment(segment);
}

}  // namespace mybackend::caching
