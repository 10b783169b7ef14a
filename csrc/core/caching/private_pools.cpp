// Private pools: memory set apart for a graph capture or a MemPool.
#include <algorithm>

#include "core/caching/caching_allocator.h"

namespace mybackend::caching {
namespace {

Status unknown_pool(PoolId id) {
  return {StatusCode::kInvalidArgument, "memory pool (" + std::to_string(id.first) + ", " + std::to_string(id.second) + ") does not exist"};
}

}  // namespace

PrivatePool* CachingAllocator::find_pool(PoolId id) const {
  for (const auto& pool : private_pools_) {
    if (pool->id == id) return pool.get();
  }
  return nullptr;
}

void CachingAllocator::create_or_use_pool(PoolId id, bool no_split, bool use_on_oom, std::shared_ptr<const SegmentSource> source) {
  Lock lock(mutex_);
  PrivatePool* pool = find_pool(id);
  if (pool == nullptr) {
    private_pools_.push_back(std::make_unique<PrivatePool>(id));
    pool = private_pools_.back().get();
    pool->source = std::move(source);
    if (pool->source != nullptr) has_sources_.store(true, std::memory_order_release);
  } else {
    freeable_pools_.erase(id);
    ++pool->use_count;
  }
  pool->no_split = pool->no_split || no_split;
  if (use_on_oom) fallback_pools_[id] = 1;
}

Status CachingAllocator::begin_allocate_to_pool(PoolId id, StreamFilter filter) {
  if (id == PoolId{0, 0}) return {StatusCode::kInvalidArgument, "(0, 0) is the default pool"};
  create_or_use_pool(id, false, false);
  Lock lock(mutex_);
  active_pools_.push_back({find_pool(id), std::move(filter)});
  capture_count_ += id.first != 0;
  return {};
}

Status CachingAllocator::end_allocate_to_pool(PoolId id) {
  Lock lock(mutex_);
  for (std::size_t i = active_pools_.size(); i-- > 0;) {
    if (active_pools_[i].pool->id == id) {
      active_pools_.erase(active_pools_.begin() + static_cast<std::ptrdiff_t>(i));
      capture_count_ -= id.first != 0;
      return {};
    }
  }
  return {StatusCode::kInvalidArgument, "end_allocate_to_pool without a begin for this pool"};
}

Status CachingAllocator::release_pool(PoolId id) {
  Lock lock(mutex_);
  PrivatePool* pool = find_pool(id);
  if (pool == nullptr || pool->use_count == 0) return unknown_pool(id);
  if (--pool->use_count == 0) freeable_pools_[id] = 1;
  return {};
}

std::int64_t CachingAllocator::pool_use_count(PoolId id) const {
  Lock lock(mutex_);
  const PrivatePool* pool = find_pool(id);
  return pool != nullptr ? pool->use_count : 0;
}

Status CachingAllocator::set_no_split(PoolId id) {
  Lock lock(mutex_);
  PrivatePool* pool = find_pool(id);
  if (pool == nullptr) return unknown_pool(id);
  pool->no_split = true;
  return {};
}

Status CachingAllocator::set_use_on_oom(PoolId id, bool use_on_oom) {
  Lock lock(mutex_);
  if (find_pool(id) == nullptr) return unknown_pool(id);
  if (use_on_oom)
    fallback_pools_[id] = 1;
  else
    fallback_pools_.erase(id);
  return {};
}

void CachingAllocator::begin_capture() {
  Lock lock(mutex_);
  ++capture_count_;
}

void CachingAllocator::end_capture() {
  Lock lock(mutex_);
  if (capture_count_ > 0) --capture_count_;
}

}  // namespace mybackend::caching
