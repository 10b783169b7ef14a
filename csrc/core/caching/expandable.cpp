// Expandable segments: free blocks that grow by mapping pages behind them.
#include <algorithm>

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
  Block lowest;
  lowest.stream = r.stream;
  BlockPool& pool = *r.pool;
  for (auto it = pool.unmapped.lower_bound(&lowest); it != pool.unmapped.end() && (*it)->stream == r.stream; ++it) {
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
  if (range->bytes() < r.bytes) {
    const_cast<Request&>(r).driver_status = {StatusCode::kOutOfMemory, "the request exceeds the address range of an expandable segment"};
    return nullptr;
  }
  Segment* segment = new_segment(range->address(), range->bytes(), r.stream, &pool);
  segment->expandable = std::move(range);
  segment->first->mapped = false;
  pool.unmapped.insert(segment->first);
  return segment->first;
}

// Maps the first `bytes` of an unmapped block, rounded up to pages, and merges the result with
// its mapped neighbours into one free block: `block`.
bool CachingAllocator::map_block(Block* block, std::size_t bytes, const Context& context) {
  AddressSpan mapped;
  if (!block->segment->expandable->map({block->address, bytes}, &mapped).ok()) return false;
  BlockPool& pool = *block->pool;
  if (mapped.bytes < block->bytes) {
    Block* rest = new_block();
    rest->address = block->address + mapped.bytes;
    rest->bytes = block->bytes - mapped.bytes;
    rest->stream = block->stream;
    rest->pool = block->pool;
    rest->segment = block->segment;
    rest->mapped = false;
    rest->previous = block;
    rest->next = block->next;
    if (rest->next != nullptr) rest->next->previous = rest;
    pool.unmapped.erase(block);
    block->next = rest;
    block->bytes = mapped.bytes;
    pool.unmapped.insert(rest);
  } else {
    pool.unmapped.erase(block);
  }
  block->mapped = true;
  merge(block, block->previous);
  merge(block, block->next);
  insert_free(block);
  if (pool.owner != nullptr) pool.owner->segment_count += 1;
  change_reserved(pool, static_cast<std::int64_t>(mapped.bytes));
  ++stats_.num_device_alloc;
  if (history_.enabled()) {
    if (!block->segment->context) block->segment->context = context;
    record(Action::kSegmentMap, mapped.address, mapped.bytes, block->stream, &pool, context);
  }
  return true;
}

Block* CachingAllocator::grow_expandable(Request& r) {
  Block* block = find_expandable_space(r);
  if (block == nullptr) return nullptr;
  if (!block->mapped && !map_block(block, std::min(block->bytes, r.bytes), r.context)) return nullptr;
  while (block->bytes < r.bytes) {
    // A failure keeps what was mapped so far: it is free and merged.
    Block* hole = block->next;
    if (!map_block(hole, std::min(r.bytes - block->bytes, hole->bytes), r.context)) return nullptr;
    block = hole;  // the predecessor was merged into it
  }
  r.pool->free.erase(block);
  return block;
}

// Gives back the pages that lie wholly inside a free block. What remains at its ends stays
// free; the hole becomes an unmapped block.
void CachingAllocator::unmap_block(Block* block, const Context& context) {
  BlockPool& pool = *block->pool;
  AddressSpan unmapped;
  (void)block->segment->expandable->unmap({block->address, block->bytes}, block->stream, &unmapped);
  if (unmapped.bytes == 0) return;
  pool.free.erase(block);
  const std::size_t before_bytes = unmapped.address - block->address;
  const std::size_t after_bytes = block->bytes - before_bytes - unmapped.bytes;
  auto split_off = [&](std::uintptr_t address, std::size_t bytes, Block* previous, Block* next) {
    Block* part = new_block();
    part->address = address;
    part->bytes = bytes;
    part->stream = block->stream;
    part->pool = block->pool;
    part->segment = block->segment;
    part->previous = previous;
    part->next = next;
    if (previous != nullptr)
      previous->next = part;
    else
      block->segment->first = part;
    if (next != nullptr) next->previous = part;
    insert_free(part);
  };
  if (before_bytes > 0) split_off(block->address, before_bytes, block->previous, block);
  if (after_bytes > 0) split_off(unmapped.address + unmapped.bytes, after_bytes, block, block->next);
  block->address = unmapped.address;
  block->bytes = unmapped.bytes;
  block->mapped = false;
  merge(block, block->previous);
  merge(block, block->next);
  pool.unmapped.insert(block);
  if (pool.owner != nullptr) pool.owner->segment_count -= 1;
  change_reserved(pool, -static_cast<std::int64_t>(unmapped.bytes));
  ++stats_.num_device_free;
  record(Action::kSegmentUnmap, unmapped.address, unmapped.bytes, block->stream, &pool, context);
}

void CachingAllocator::drop_expandable_segment(Block* block) {
  block->pool->unmapped.erase(block);
  Segment* segment = block->segment;
  delete_block(block);
  delete_segment(segment);
}

}  // namespace mybackend::caching
