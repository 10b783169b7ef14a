// The records of all blocks, kept by address: a block is found by where it starts, and the
// records of blocks that are near each other in memory are near each other too. So the cost of
// a free does not depend on where earlier ones were, and neighbours share pages and often lines.
//
// The address space is cut into regions of 2 MiB. A region that holds the start of a block has
// its own records, in chunks that never move, and its own index of them: open addressing with
// linear probing, at most half full, deletion by shifting back (no tombstones, so it does not
// age).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/caching/block.h"

namespace mybackend::caching {

class BlockTable {
 public:
  BlockTable() : regions_(kMinRegions) {}
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // A record for a block at `address`, a multiple of 512 where no block starts yet. It stays
  // at its place until it is destroyed; its address must not be changed.
  Block* create(std::uintptr_t address);
  void destroy(Block* block) noexcept;

  // The block that starts at `address`; nullptr when none does.
  Block* find(std::uintptr_t address) const noexcept {
    if ((address & (kGranuleBytes - 1)) != 0) return nullptr;
    const Region* region = find_region(address >> kRegionShift);
    if (region == nullptr) return nullptr;
    const std::uint64_t tag = tag_of(address);
    for (std::size_t i = home(address, region->mask);; i = (i + 1) & region->mask) {
      const std::uint64_t slot = region->slots[i];
      if (slot == 0) return nullptr;
      if ((slot & ~kPointerMask) == tag) return reinterpret_cast<Block*>(slot & kPointerMask);
    }
  }

  std::size_t size() const noexcept { return size_; }

 private:
  static constexpr int kRegionShift = 21;
  static constexpr int kGranuleShift = 9;
  static constexpr std::uintptr_t kGranuleBytes = std::uintptr_t{1} << kGranuleShift;
  static constexpr std::size_t kMinRegions = 64;
  static constexpr std::size_t kManyRegions = 4096;
  static constexpr std::size_t kMinSlots = 8;
  // A slot: where in its region the block starts (12 bits), and its record (user addresses fit
  // into 52 bits). 0 is an empty slot.
  static constexpr std::uint64_t kPointerMask = (std::uint64_t{1} << 52) - 1;

  struct Storage {
    std::vector<std::unique_ptr<Block[]>> chunks;
    Block* spare = nullptr;  // linked by next
    std::size_t record_count = 0;
  };
  struct Region {
    std::uint64_t number = 0;
    std::unique_ptr<std::uint64_t[]> slots;  // nullptr: no region here
    std::uint32_t mask = 0;
    std::uint32_t count = 0;  // blocks that start in it
    std::unique_ptr<Storage> storage;
  };

  static std::uint64_t tag_of(std::uintptr_t address) noexcept {
    return static_cast<std::uint64_t>((address >> kGranuleShift) & 0xFFF) << 52;
  }
  static std::size_t home(std::uintptr_t address, std::uint32_t mask) noexcept {
    // Fibonacci hashing: what is evenly spaced stays evenly spread.
    const auto place = static_cast<std::uint32_t>(address >> kGranuleShift) & 0xFFF;
    const std::uint32_t hash = place * 0x9E3779B1u;
    return static_cast<std::size_t>((static_cast<std::uint64_t>(hash) * (std::uint64_t{mask} + 1)) >> 32);
  }
  std::size_t region_home(std::uint64_t number) const noexcept {
    return static_cast<std::size_t>((number * 0x9E3779B97F4A7C15ull) >> 32) & (regions_.size() - 1);
  }
  const Region* find_region(std::uint64_t number) const noexcept {
    for (std::size_t i = region_home(number); regions_[i].slots != nullptr; i = (i + 1) & (regions_.size() - 1)) {
      if (regions_[i].number == number) return &regions_[i];
    }
    return nullptr;
  }
  Region* find_region(std::uint64_t number) noexcept {
    return const_cast<Region*>(static_cast<const BlockTable*>(this)->find_region(number));
  }
  Region* make_region(std::uint64_t number);
  void rehash_regions(std::size_t capacity);
  static void add_records(Region& region);
  static void grow_index(Region& region);
  static void place(Region& region, std::uint64_t slot, std::uintptr_t address) noexcept;

  std::vector<Region> regions_;  // open addressing by number; a power of two, at most half full
  std::size_t region_count_ = 0;
  std::size_t empty_region_count_ = 0;
  std::size_t size_ = 0;
};

}  // namespace mybackend::caching
