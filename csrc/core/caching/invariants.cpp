#include <sstream>

#include "core/caching/caching_allocator.h"
#include "core/caching/expandable_range.h"

namespace mybackend::caching {
namespace {

// What the statistics must say, counted again from the blocks.
struct Recount {
  std::int64_t allocation[kStatPoolCount] = {}, active[kStatPoolCount] = {}, inactive_split[kStatPoolCount] = {};
  std::int64_t allocated_bytes[kStatPoolCount] = {}, active_bytes[kStatPoolCount] = {};
  std::int64_t inactive_split_bytes[kStatPoolCount] = {}, requested_bytes[kStatPoolCount] = {};
  std::int64_t reserved_bytes[kStatPoolCount] = {}, segment[kStatPoolCount] = {};

  static void add(std::int64_t (&counter)[kStatPoolCount], int pool, std::size_t amount) {
    counter[kAll] += static_cast<std::int64_t>(amount);
    counter[pool] += static_cast<std::int64_t>(amount);
  }
};

}  // namespace

std::string CachingAllocator::check_invariants() const {
  Lock lock(mutex_);
  std::ostringstream wrong;
  auto fail = [&](const Block* block, const char* what) {
    wrong << "block at 0x" << std::hex << (block != nullptr ? block->address : 0) << std::dec << ": " << what << '\n';
  };
  Recount count;
  std::size_t block_count = 0, free_blocks = 0, unmapped_blocks = 0;
  for (const auto& segment : segments_) {
    const int pool = stat_pool(*segment->pool);
    std::uintptr_t expected = segment->address;
    const Block* previous = nullptr;
    std::size_t mapped_bytes = 0;
    for (const Block* block = segment->first; block != nullptr; previous = block, block = block->next) {
      if (block->previous != previous) fail(block, "is not linked to its predecessor");
      if (block->address != expected) fail(block, "does not begin where its predecessor ends");
      if (blocks_.find(block->address) != block) fail(block, "is not found by its address");
      ++block_count;
      if (block->bytes == 0) fail(block, "is empty");
      if (block->segment != segment.get()) fail(block, "belongs to another segment");
      if (!segment->expandable && !block->mapped) fail(block, "is unmapped in an ordinary segment");
      expected += block->bytes;
      if (previous != nullptr && previous->is_available() && block->is_available() && previous->mapped == block->mapped) {
        fail(block, "and its predecessor are both free and not merged");
      }
      const bool available = block->is_available();
      if (!block->mapped) {
        ++unmapped_blocks;
        if (!available) fail(block, "is unmapped but in use");
        if (block->pool().unmapped.count(const_cast<Block*>(block)) == 0) fail(block, "is not in the unmapped set");
        continue;
      }
      mapped_bytes += block->bytes;
      if (available) {
        ++free_blocks;
        if (!block->pool().free.contains(block)) fail(block, "is free but not in the free set");
        if (block->is_split() && !segment->expandable) {
          Recount::add(count.inactive_split, pool, 1);
          Recount::add(count.inactive_split_bytes, pool, block->bytes);
        }
      } else {
        if (block->pool().free.contains(block)) fail(block, "is in use and in the free set");
        Recount::add(count.active, pool, 1);
        Recount::add(count.active_bytes, pool, block->bytes);
        Recount::add(count.requested_bytes, pool, block->requested_bytes);
        if (block->allocated) {
          Recount::add(count.allocation, pool, 1);
          Recount::add(count.allocated_bytes, pool, block->bytes);
        }
      }
    }
    if (expected != segment->address + segment->bytes) fail(previous, "is the last, but the segment goes on");
    Recount::add(count.reserved_bytes, pool, mapped_bytes);
    if (segment->expandable) {
      if (mapped_bytes != segment->expandable->mapped_page_count() * segment->expandable->page_bytes()) {
        fail(segment->first, "begins a segment whose mapped pages and mapped blocks differ");
      }
    } else {
      Recount::add(count.segment, pool, 1);
    }
  }
  std::size_t in_free_sets = small_.free.size() + large_.free.size();
  std::size_t in_unmapped_sets = small_.unmapped.size() + large_.unmapped.size();
  for (const auto& pool : private_pools_) {
    in_free_sets += pool->small.free.size() + pool->large.free.size();
    in_unmapped_sets += pool->small.unmapped.size() + pool->large.unmapped.size();
  }
  if (in_free_sets != free_blocks) wrong << "free sets hold " << in_free_sets << " blocks, segments " << free_blocks << '\n';
  if (in_unmapped_sets != unmapped_blocks)
    wrong << "unmapped sets hold " << in_unmapped_sets << " blocks, segments " << unmapped_blocks << '\n';
  if (blocks_.size() != block_count) wrong << "the block table holds " << blocks_.size() << " blocks, segments " << block_count << '\n';
  if (count.reserved_bytes[kAll] != static_cast<std::int64_t>(reserved_bytes_)) wrong << "reserved bytes differ from a recount\n";
  auto compare = [&](const char* name, const StatArray& stat, const std::int64_t (&counted)[kStatPoolCount]) {
    for (int pool = 0; pool < kStatPoolCount; ++pool) {
      if (stat[pool].current != counted[pool]) {
        wrong << name << '[' << pool << "] says " << stat[pool].current << ", a recount " << counted[pool] << '\n';
      }
      if (stat[pool].current < 0 || stat[pool].peak < stat[pool].current) wrong << name << '[' << pool << "]: impossible value or peak\n";
    }
  };
  compare("allocation", stats_.allocation, count.allocation);
  compare("active", stats_.active, count.active);
  compare("inactive_split", stats_.inactive_split, count.inactive_split);
  compare("allocated_bytes", stats_.allocated_bytes, count.allocated_bytes);
  compare("active_bytes", stats_.active_bytes, count.active_bytes);
  compare("inactive_split_bytes", stats_.inactive_split_bytes, count.inactive_split_bytes);
  compare("requested_bytes", stats_.requested_bytes, count.requested_bytes);
  compare("reserved_bytes", stats_.reserved_bytes, count.reserved_bytes);
  compare("segment", stats_.segment, count.segment);
  return wrong.str();
}

}  // namespace mybackend::caching
