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
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->allocated) live.push_back(reinterpret_cast<void*>(block->address));
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
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->allocated) {
        checkpoint.live.push_back({block->address, block->bytes, block->requested_bytes});
      } else if (!block->is_available()) {
        return {StatusCode::kNotReady, "checkpoint: a freed block of the pool is still used by another stream"};
      }
    }
  }
  *out = std::move(checkpoint);
  return {};
}

// Hands out [address, address + bytes) of a free block; what is before and behind stays free.
Block* CachingAllocator::carve(Block* block, std::uintptr_t address, std::size_t bytes, const Context& context) {
  BlockPool& pool = block->pool();
  const int which = stat_pool(pool);
  const auto change_split = [&](const Block* b, int sign) {
    if (b->is_expandable() || !b->is_split()) return;
    if (sign > 0) {
      add(stats_.inactive_split, which, 1);
      add(stats_.inactive_split_bytes, which, static_cast<std::int64_t>(b->bytes));
    } else {
      subtract(stats_.inactive_split, which, 1);
      subtract(stats_.inactive_split_bytes, which, static_cast<std::int64_t>(b->bytes));
    }
  };
  pool.free.erase(block);
  change_split(block, -1);
  Block* before = nullptr;
  if (address > block->address) {
    before = block;
    block = split(before, address - before->address);
    block->requested_bytes = before->requested_bytes;
  }
  Block* behind = bytes < block->bytes ? split(block, bytes) : nullptr;
  for (Block* rest : {before, behind}) {
    if (rest == nullptr) continue;
    insert_free(rest);
    change_split(rest, 1);
  }
  block->allocated = true;
  add(stats_.allocation, which, 1);
  add(stats_.allocated_bytes, which, static_cast<std::int64_t>(bytes));
  add(stats_.active, which, 1);
  add(stats_.active_bytes, which, static_cast<std::int64_t>(bytes));
  if (bytes >= settings_.max_split_size_mb) stats_.oversize_allocations.increase(1);
  if (context) block->need_extra().context = context;
  return block;
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
  std::vector<Block*> live;
  for (const auto& segment : segments_) {
    if (segment->pool->owner != pool) continue;
    bool open = false;
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->allocated) live.push_back(block);
      if (!block->allocated && !block->is_available()) {
        return {StatusCode::kNotReady, "restore: a freed block of the pool is still used by another stream"};
      }
      if (!block->mapped) {
        open = false;
      } else if (std::exchange(open, true)) {
        pieces.back().end = block->address + block->bytes;
      } else {
        pieces.push_back({block->address, block->address + block->bytes, segment.get()});
      }
    }
  }
  for (const PoolCheckpoint::LiveBlock& wanted : checkpoint.live) {
    const bool found = std::any_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
      return wanted.address >= piece.address && wanted.address + wanted.bytes <= piece.end;
    });
    if (!found) return {StatusCode::kInvalidArgument, "restore: memory of the checkpoint is not the pool's any more"};
  }
  for (Block* block : live) {
    freed->push_back(reinterpret_cast<void*>(block->address));
    block->allocated = false;
    if (block->extra != nullptr) block->extra->stream_uses.clear();  // a checkpoint is restored between runs: they are done
    const int which = stat_pool(block->pool());
    subtract(stats_.allocation, which, 1);
    subtract(stats_.allocated_bytes, which, static_cast<std::int64_t>(block->bytes));
    record(Action::kFreeRequested, block->address, block->requested_bytes, block->stream(), &block->pool(), context);
    if (block->bytes >= settings_.max_split_size_mb) stats_.oversize_allocations.decrease(1);
    put_back(block, context);
  }
  for (const PoolCheckpoint::LiveBlock& wanted : checkpoint.live) {
    const auto piece =
        std::find_if(pieces.begin(), pieces.end(), [&](const Piece& p) { return wanted.address >= p.address && wanted.address < p.end; });
    Block* block = piece->segment->first;
    while (block->address + block->bytes <= wanted.address) block = block->next;
    block = carve(block, wanted.address, wanted.bytes, context);
    block->requested_bytes = wanted.requested_bytes;
    add(stats_.requested_bytes, stat_pool(block->pool()), static_cast<std::int64_t>(wanted.requested_bytes));
    record(Action::kAlloc, block->address, block->requested_bytes, block->stream(), &block->pool(), context);
    allocated->push_back(reinterpret_cast<void*>(block->address));
  }
  return {};
}

}  // namespace mybackend::caching
