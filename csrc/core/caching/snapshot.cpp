// The state as data: one entry for each contiguous piece of memory, with its blocks.
#include <algorithm>

#include "core/caching/caching_allocator.h"
#include "core/caching/expandable_range.h"

namespace mybackend::caching {

std::vector<SegmentInfo> CachingAllocator::snapshot(bool mark) {
  Context context = mark ? capture_context(RecordContext::kState) : Context();
  Lock lock(mutex_);
  std::vector<SegmentInfo> result;
  for (const auto& segment : segments_) {
    Block block = blocks_.first(*segment);
    while (block) {
      if (!block.is_mapped()) {
        block = block.next();
        continue;
      }
      SegmentInfo info{};
      info.device = device_;
      info.address = block.address();
      info.stream = segment->stream;
      info.is_large = !segment->pool->is_small;
      info.is_expandable = segment->expandable != nullptr;
      info.pool_id = segment->pool->owner != nullptr ? segment->pool->owner->id : PoolId{0, 0};
      info.context = segment->context;
      for (; block && block.is_mapped(); block = block.next()) {
        const std::size_t bytes = block.bytes(), requested_bytes = blocks_.requested_bytes(block);
        const bool allocated = block.is_allocated(), active = !block.is_available();
        const BlockExtra* extra = blocks_.extra(block);
        info.blocks.push_back({block.address(), bytes, requested_bytes, allocated, active,
                               active ? 0 : segment->pool->free.age(block.address()), extra != nullptr ? extra->context : Context()});
        info.total_bytes += bytes;
        if (allocated) info.allocated_bytes += bytes;
        if (active) {
          info.active_bytes += bytes;
          info.requested_bytes += requested_bytes;
        }
      }
      result.push_back(std::move(info));
    }
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.address < b.address; });
  if (mark) {
    std::size_t total = 0;
    for (const SegmentInfo& info : result) total += info.active_bytes;
    record(Action::kSnapshot, 0, total, 0, nullptr, context);
  }
  return result;
}

}  // namespace mybackend::caching
