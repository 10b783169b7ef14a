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
  const auto fail = [&](std::uintptr_t address, const char* what) {
    wrong << "block at 0x" << std::hex << address << std::dec << ": " << what << '\n';
  };
  Recount count;
  std::size_t block_count = 0, free_blocks = 0, unmapped_blocks = 0;
  for (std::size_t index = 0; index < segments_.size(); ++index) {
    const Segment* const segment = segments_[index].get();
    const int pool = stat_pool(*segment->pool);
    if (segment->index != index) fail(segment->address, "begins a segment that does not know its index");
    std::uintptr_t expected = segment->address;
    Block previous;
    std::size_t mapped_bytes = 0;
    for (Block block = blocks_.first(*segment); block; previous = block, block = block.next()) {
      const std::uintptr_t address = block.address();
      const std::size_t bytes = block.bytes();
      if (block.previous() != previous) fail(address, "is not linked to its predecessor");
      if (address != expected) fail(address, "does not begin where its predecessor ends");
      if (blocks_.find(address) != block) fail(address, "is not found by its address");
      ++block_count;
      if (bytes == 0 || block.end() <= address) fail(address, "is empty");
      if (&block.segment() != segment) fail(address, "belongs to another segment");
      if (!segment->expandable && !block.is_mapped()) fail(address, "is unmapped in an ordinary segment");
      expected = block.end();
      const bool available = block.is_available();
      if (previous && previous.is_available() && available && previous.is_mapped() == block.is_mapped()) {
        fail(address, "and its predecessor are both free and not merged");
      }
      const FreeSet::Key key{bytes, address};
      if (!block.is_mapped()) {
        ++unmapped_blocks;
        if (!available) fail(address, "is unmapped but in use");
        if (segment->pool->unmapped.count({segment->stream, address}) == 0) fail(address, "is not in the unmapped set");
        continue;
      }
      mapped_bytes += bytes;
      if (available) {
        ++free_blocks;
        if (!segment->pool->free.contains(segment->stream, key)) fail(address, "is free but not in the free set");
        if (block.is_split() && !segment->expandable) {
          Recount::add(count.inactive_split, pool, 1);
          Recount::add(count.inactive_split_bytes, pool, bytes);
        }
      } else {
        if (segment->pool->free.contains(segment->stream, key)) fail(address, "is in use and in the free set");
        Recount::add(count.active, pool, 1);
        Recount::add(count.active_bytes, pool, bytes);
        Recount::add(count.requested_bytes, pool, blocks_.requested_bytes(block));
        if (block.is_allocated()) {
          Recount::add(count.allocation, pool, 1);
          Recount::add(count.allocated_bytes, pool, bytes);
        }
      }
    }
    if (expected != segment->address + segment->bytes) fail(previous ? previous.address() : 0, "is the last, but the segment goes on");
    Recount::add(count.reserved_bytes, pool, mapped_bytes);
    if (segment->expandable) {
      if (mapped_bytes != segment->expandable->mapped_page_count() * segment->expandable->page_bytes()) {
        fail(segment->address, "begins a segment whose mapped pages and mapped blocks differ");
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
