// Expandable segments: free blocks that grow by mapping pages behind them.
#include <algorithm>
#include <utility>

#include "core/caching/expandable_range.h"
#include "core/caching/request.h"
#include "core/caching/sizing.h"

namespace mybackend::caching {

// The lowest unmapped block of the stream behind which (or at whose free predecessor) there
// is enough contiguous space, mapped or not; else the one block of a new segment.
Block CachingAllocator::find_expandable_space(Request& r) {
  const auto has_room = [&](Block block) {
    std::size_t room = 0;
    for (; block && block.is_available() && room < r.bytes; block = block.next()) room += block.bytes();
    return room >= r.bytes;
  };
  BlockPool& pool = *r.pool;
  for (auto it = pool.unmapped.lower_bound({r.stream, 0}); it != pool.unmapped.end() && it->first == r.stream; ++it) {
    Block start = blocks_.find(it->second);
    if (const Block previous = start.previous(); previous && previous.is_available()) start = previous;
    if (has_room(start)) return start;
  }
  std::unique_ptr<ExpandableRange> range;
  const std::size_t page_bytes = pool.is_small ? kSmallSegmentBytes : settings_.large_segment_size_mb;
  r.driver_status = ExpandableRange::create(driver_, device_, page_bytes, &range);
  if (!r.driver_status.ok()) return {};
  const AddressSpan span{range->address(), range->bytes()};
  Segment* segment = new_segment(span.address, span.bytes, r.stream, &pool, std::move(range));
  const Block first = blocks_.first(*segment);
  first.set_mapped(false);
  pool.unmapped.insert({r.stream, segment->address});
  return first;
}

// Maps the first `bytes` of an unmapped block, rounded up to pages, and merges the result with
// its mapped neighbours into one free block. Returns that, or nothing when it cannot be mapped:
// then r.driver_status says why.
Block CachingAllocator::map_block(Block block, std::size_t bytes, Request& r) {
  Segment& segment = block.segment();
  BlockPool& pool = *segment.pool;
  AddressSpan mapped;
  r.driver_status = segment.expandable->map({block.address(), bytes}, &mapped);
  if (!r.driver_status.ok()) return {};
  pool.unmapped.erase({segment.stream, block.address()});
  if (mapped.bytes < block.bytes()) pool.unmapped.insert({segment.stream, blocks_.divide(block, mapped.bytes).address()});
  block.set_mapped(true);
  block = merge_neighbours(block);
  insert_free(block);
  if (pool.owner != nullptr) pool.owner->segment_count += 1;
  change_reserved(pool, static_cast<std::int64_t>(mapped.bytes));
  ++stats_.num_device_alloc;
  if (history_.enabled() || !trackers_.empty()) {
    if (!segment.context) segment.context = r.context;
    record(Action::kSegmentMap, mapped.address, mapped.bytes, segment.stream, &pool, r.context);
  }
  return block;
}

Block CachingAllocator::grow_expandable(Request& r) {
  Block block = find_expandable_space(r);
  if (!block) return {};
  if (!block.is_mapped()) block = map_block(block, std::min(block.bytes(), r.bytes), r);
  // A failure keeps what was mapped so far: it is free and merged.
  while (block && block.bytes() < r.bytes) {
    const Block next = block.next();
    if (!next) return {};  // larger than the whole range, so than the device
    block = map_block(next, std::min(r.bytes - block.bytes(), next.bytes()), r);
  }
  if (block) r.pool->free.erase(r.stream, key_of(block));
  return block;
}

// Gives back the pages that lie wholly inside a free block. What remains at its ends stays
// free; the hole becomes an unmapped block, which is returned (the block itself when no page
// could be given back).
Block CachingAllocator::unmap_block(Block block, const Context& context) {
  Segment& segment = block.segment();
  BlockPool& pool = *segment.pool;
  const FreeSet::Key key = key_of(block);
  AddressSpan unmapped;
  (void)segment.expandable->unmap({key.address, key.bytes}, segment.stream, &unmapped);
  if (unmapped.bytes == 0) return block;
  pool.free.erase(segment.stream, key);
  if (unmapped.address > key.address) {
    Block before = block;
    block = blocks_.divide_alike(before, unmapped.address - key.address);
    before = blocks_.set_requested_bytes(before, 0);
    insert_free(before);
  }
  if (unmapped.bytes < block.bytes()) insert_free(blocks_.divide(block, unmapped.bytes));
  block.set_mapped(false);
  block = merge_neighbours(block);
  pool.unmapped.insert({segment.stream, block.address()});
  if (pool.owner != nullptr) pool.owner->segment_count -= 1;
  change_reserved(pool, -static_cast<std::int64_t>(unmapped.bytes));
  ++stats_.num_device_free;
  record(Action::kSegmentUnmap, unmapped.address, unmapped.bytes, segment.stream, &pool, context);
  return block;
}

void CachingAllocator::drop_expandable_segment(Block block) {
  Segment& segment = block.segment();
  segment.pool->unmapped.erase({segment.stream, block.address()});
  blocks_.end(block);
  delete_segment(&segment);
}

}  // namespace mybackend::caching
