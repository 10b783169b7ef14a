// Vocabulary of the caching allocator.
//
//   segment   memory taken from the driver in one piece, or (expandable) an address range in
//             which pages are mapped as needed
//   block     a part of a segment. The blocks of a segment tile it.
//             active:  handed out, or freed while another stream still uses it
//             inactive: in its pool's free set; two free neighbours in the same mapped state
//             are always merged
//             unmapped: part of an expandable segment without memory
//   pool      small or large; the default pair, and a pair for each private pool
//   split     a block with neighbours: its segment cannot be given back
//
// All of it is guarded by the mutex of the CachingAllocator that owns it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/caching/free_set.h"
#include "driver/driver.h"

namespace mybackend::caching {

struct Leaf;
struct PrivatePool;
class ExpandableRange;

// (0, 0) is the default pool. As in PyTorch: first is set for graph captures, second for pools
// that a program made.
using PoolId = std::pair<std::uint64_t, std::uint64_t>;

// What a history recorder captured at an event; opaque to the allocator.
using Context = std::shared_ptr<void>;

struct BlockPool {
  explicit BlockPool(bool small, PrivatePool* owner) : is_small(small), owner(owner) {}

  const bool is_small;
  PrivatePool* const owner;                                    // nullptr for the default pools
  FreeSet free;                                                // inactive mapped blocks by (stream, size, address)
  std::set<std::pair<StreamHandle, std::uintptr_t>> unmapped;  // unmapped blocks by (stream, address)
};

struct Segment {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;  // of an expandable segment: the whole address range
  StreamHandle stream = 0;
  BlockPool* pool = nullptr;
  std::unique_ptr<ExpandableRange> expandable;
  Leaf* first = nullptr;  // where the records of its blocks begin (block_table.h)
  std::size_t index = 0;  // in the allocator's list
  Context context;        // of its allocation
};

// Where a private pool gets its segments instead of from the driver. Called under the allocator's
// mutex (allocate: without it): it must not come back to this allocator.
struct SegmentSource {
  std::function<void*(std::size_t bytes, StreamHandle stream)> allocate;  // nullptr: no memory
  std::function<void(void* ptr, std::size_t bytes, StreamHandle stream)> free;
};

// Whether this thread is in a SegmentSource's allocate.
bool in_segment_source() noexcept;

struct PrivatePool {
  explicit PrivatePool(PoolId id) : id(id) {}

  const PoolId id;
  std::int64_t use_count = 1;
  std::int64_t segment_count = 0;  // driver allocations that are still held
  bool no_split = false;
  std::shared_ptr<const SegmentSource> source;  // nullptr: the driver
  BlockPool small{true, this};
  BlockPool large{false, this};
};

}  // namespace mybackend::caching
