// One allocation on its way through the allocator.
#pragma once

#include <utility>

#include "core/caching/caching_allocator.h"

namespace mybackend::caching {

struct CachingAllocator::Request {
  Request(std::size_t size, StreamHandle s, BlockPool* p, Context c) noexcept
      : requested_bytes(size), bytes(size), segment_bytes(size), stream(s), pool(p), context(std::move(c)) {}

  std::size_t requested_bytes;
  std::size_t bytes;          // rounded
  std::size_t segment_bytes;  // what a new segment for it would take
  StreamHandle stream;
  BlockPool* pool;
  Block block;
  FreeSet::Key found;  // the block's, in the pool's free set; none: it is in no set
  Context context;
  Status driver_status;  // the last refusal
  bool refused_by_limit = false;
  // An error of the driver that no freed memory mends; or throw_on_cudamalloc_oom, and it was not
  // tried since it would have exceeded the fraction.
  bool fails_at_once = false;
};

}  // namespace mybackend::caching
