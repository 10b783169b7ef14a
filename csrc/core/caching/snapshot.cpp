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
    const Block* block = segment->first;
    while (block != nullptr) {
      if (!block->mapped) {
        block = block->next;
        continue;
      }
      SegmentInfo info{};
      info.device = device_;
      info.address = block->address;
      info.stream = segment->stream;
      info.is_large = !segment->pool->is_small;
      info.is_expandable = segment->expandable != nullptr;
      info.pool_id = segment->pool->owner != nullptr ? segment->pool->owner->id : PoolId{0, 0};
      info.context = segment->context;
      for (; block != nullptr && block->mapped; block = block->next) {
        const bool active = !block->is_available();
        info.blocks.push_back(
            {block->address, block->bytes, block->requested_bytes, block->allocated, active, active ? 0 : block->age(), block->context()});
        info.total_bytes += block->bytes;
        if (block->allocated) info.allocated_bytes += block->bytes;
        if (active) {
          info.active_bytes += block->bytes;
          info.requested_bytes += block->requested_bytes;
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
