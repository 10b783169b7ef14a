// Checkpoints of private pools: a graph that was recorded finds its tensors at the same addresses.
#include <algorithm>

#include "core/caching/caching_allocator.h"

namespace mybackend::caching {

std::vector<void*> CachingAllocator::pool_live_allocations(PoolId id) const {
  Lock lock(mutex_);
  std::vector<void*> live;
  const PrivatePool* pool = find_pool(id);
  for (const auto& segment : segments_) {
    if (pool == nullptr || segment->pool->owner != pool) continue;
    for (Block block = blocks_.first(*segment); block; block = block.next()) {
      if (block.is_allocated()) live.push_back(reinterpret_cast<void*>(block.address()));
    }
  }
  std::sort(live.begin(), live.end());
  return live;
}

Status CachingAllocator::checkpoint_pool(PoolId id, PoolCheckpoint* out) {
  const Context context = capture_context(RecordContext::kAll);
  Lock lock(mutex_);
  const PrivatePool* pool = find_pool(id);
  if (pool == nullptr || pool->use_count == 0) {
    return {StatusCode::kInvalidArgument, "checkpoint: the memory pool does not exist, or nothing uses it"};
  }
  if (capture_count_ == 0) process_events(context);
  PoolCheckpoint checkpoint;
  checkpoint.pool = id;
  for (const auto& segment : segments_) {
    if (segment->pool->owner != pool) continue;
    for (Block block = blocks_.first(*segment); block; block = block.next()) {
      if (block.is_allocated()) {
        checkpoint.live.push_back({block.address(), block.bytes(), blocks_.requested_bytes(block)});
      } else if (!block.is_available()) {
        return {StatusCode::kNotReady, "checkpoint: a freed block of the pool is still used by another stream"};
      }
    }
  }
  *out = std::move(checkpoint);
  return {};
}

// Hands out wanted's part of a free block; what is before and behind stays free.
void CachingAllocator::carve(Block block, const PoolCheckpoint::LiveBlock& wanted, const Context& context) {
  BlockPool& pool = block.pool();
  const int which = stat_pool(pool);
  const auto bytes = static_cast<std::int64_t>(wanted.bytes);
  const auto change_split = [&](Block b, auto change) {
    if (b.is_expandable() || !b.is_split()) return;
    change(stats_.inactive_split, which, 1);
    change(stats_.inactive_split_bytes, which, static_cast<std::int64_t>(b.bytes()));
  };
  pool.free.erase(block.stream(), key_of(block));
  change_split(block, subtract);
  if (wanted.address > block.address()) {
    Block before = block;
    block = blocks_.divide(before, wanted.address - before.address());
    insert_free(before);
    change_split(before, add);
  }
  if (wanted.bytes < block.bytes()) {
    const Block behind = blocks_.divide(block, wanted.bytes);
    insert_free(behind);
    change_split(behind, add);
  }
  block.set_state(Block::kAllocated);
  block = blocks_.set_requested_bytes(block, wanted.requested_bytes);
  add(stats_.allocation, which, 1);
  add(stats_.allocated_bytes, which, bytes);
  add(stats_.active, which, 1);
  add(stats_.active_bytes, which, bytes);
  add(stats_.requested_bytes, which, static_cast<std::int64_t>(wanted.requested_bytes));
  if (wanted.bytes >= settings_.max_split_size_mb) stats_.oversize_allocations.increase(1);
  if (context) blocks_.need_extra(block).context = context;
  record(Action::kAlloc, wanted.address, wanted.requested_bytes, block.stream(), &pool, context);
}

Status CachingAllocator::restore_pool(const PoolCheckpoint& checkpoint, std::vector<void*>* freed, std::vector<void*>* allocated) {
  const Context context = capture_context(RecordContext::kState);
  Lock lock(mutex_);
  const PrivatePool* pool = find_pool(checkpoint.pool);
  if (pool == nullptr || pool->use_count == 0) {
    return {StatusCode::kInvalidArgument, "restore: the memory pool does not exist, or nothing uses it"};
  }
  // The pool's contiguous memory, by address: the blocks of the checkpoint must lie in it.
  struct Piece {
    std::uintptr_t address, end;
    Segment* segment;
  };
  std::vector<Piece> pieces;
  std::vector<std::uintptr_t> live;
  for (const auto& segment : segments_) {
    if (segment->pool->owner != pool) continue;
    bool open = false;
    for (Block block = blocks_.first(*segment); block; block = block.next()) {
      if (block.is_allocated()) {
        live.push_back(block.address());
      } else if (!block.is_available()) {
        return {StatusCode::kNotReady, "restore: a freed block of the pool is still used by another stream"};
      }
      if (!block.is_mapped()) {
        open = false;
      } else if (std::exchange(open, true)) {
        pieces.back().end = block.end();
      } else {
        pieces.push_back({block.address(), block.end(), segment.get()});
      }
    }
  }
  for (const PoolCheckpoint::LiveBlock& wanted : checkpoint.live) {
    const bool found = std::any_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
      return wanted.address >= piece.address && wanted.address + wanted.bytes <= piece.end;
    });
    if (!found) return {StatusCode::kInvalidArgument, "restore: memory of the checkpoint is not the pool's any more"};
  }
  for (std::uintptr_t address : live) {
    const Block block = blocks_.find(address);
    freed->push_back(reinterpret_cast<void*>(address));
    const int which = stat_pool(block.pool());
    const std::size_t bytes = block.bytes();
    subtract(stats_.allocation, which, 1);
    subtract(stats_.allocated_bytes, which, static_cast<std::int64_t>(bytes));
    record(Action::kFreeRequested, address, blocks_.requested_bytes(block), block.stream(), &block.pool(), context);
    if (bytes >= settings_.max_split_size_mb) stats_.oversize_allocations.decrease(1);
    put_back(block, context);  // a checkpoint is restored between runs: other streams' uses are done
  }
  for (const PoolCheckpoint::LiveBlock& wanted : checkpoint.live) {
    const auto piece =
        std::find_if(pieces.begin(), pieces.end(), [&](const Piece& p) { return wanted.address >= p.address && wanted.address < p.end; });
    Block block = blocks_.first(*piece->segment);
    while (block.end() <= wanted.address) block = block.next();
    carve(block, wanted, context);
    allocated->push_back(reinterpret_cast<void*>(wanted.address));
  }
  return {};
}

}  // namespace mybackend::caching
