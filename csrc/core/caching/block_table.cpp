#include "core/caching/block_table.h"

#include <algorithm>
#include <utility>

namespace mybackend::caching {

Block* BlockTable::create(std::uintptr_t address) {
  const std::uint64_t number = address >> kRegionShift;
  Region* region = find_region(number);
  if (region == nullptr) region = make_region(number);
  if (region->storage->spare == nullptr) add_records(*region);
  if ((region->count + 1) * 2 > region->mask + 1) grow_index(*region);
  // Nothing below can fail.
  Block* block = std::exchange(region->storage->spare, region->storage->spare->next);
  block->next = nullptr;
  block->address = address;
  place(*region, tag_of(address) | reinterpret_cast<std::uintptr_t>(block), address);
  if (region->count++ == 0) --empty_region_count_;
  ++size_;
  return block;
}

void BlockTable::destroy(Block* block) noexcept {
  Region& region = *find_region(block->address >> kRegionShift);
  const std::uint32_t mask = region.mask;
  const std::uint64_t wanted = tag_of(block->address) | reinterpret_cast<std::uintptr_t>(block);
  std::size_t hole = home(block->address, mask);
  while (region.slots[hole] != wanted) hole = (hole + 1) & mask;
  // Move later members of the run into the hole when the hole is on their way from home.
  for (std::size_t j = (hole + 1) & mask; region.slots[j] != 0; j = (j + 1) & mask) {
    const std::uintptr_t address = (region.slots[j] >> 52) << kGranuleShift;
    if (((j - home(address, mask)) & mask) >= ((j - hole) & mask)) {
      region.slots[hole] = region.slots[j];
      hole = j;
    }
  }
  region.slots[hole] = 0;
  *block = Block();
  block->next = std::exchange(region.storage->spare, block);
  if (--region.count == 0) ++empty_region_count_;
  --size_;
}

BlockTable::Region* BlockTable::make_region(std::uint64_t number) {
  if ((region_count_ + 1) * 2 > regions_.size()) {
    // Empty regions are kept, their segments are probably cached. But where most of a large
    // table is empty, addresses have moved on: rehashing drops those.
    const std::size_t used = region_count_ - empty_region_count_;
    const bool mostly_empty = regions_.size() >= kManyRegions && used < regions_.size() / 8;
    rehash_regions(mostly_empty ? regions_.size() : regions_.size() * 2);
  }
  Region region;
  region.number = number;
  region.slots = std::make_unique<std::uint64_t[]>(kMinSlots);
  region.mask = kMinSlots - 1;
  region.storage = std::make_unique<Storage>();
  std::size_t i = region_home(number);
  while (regions_[i].slots != nullptr) i = (i + 1) & (regions_.size() - 1);
  regions_[i] = std::move(region);
  ++region_count_;
  ++empty_region_count_;
  return &regions_[i];
}

// To the same capacity: without the empty regions.
void BlockTable::rehash_regions(std::size_t capacity) {
  std::vector<Region> old(capacity);
  old.swap(regions_);
  region_count_ = 0;
  const bool drop_empty = capacity == old.size();
  for (Region& region : old) {
    if (region.slots == nullptr || (drop_empty && region.count == 0)) continue;
    std::size_t i = region_home(region.number);
    while (regions_[i].slots != nullptr) i = (i + 1) & (capacity - 1);
    regions_[i] = std::move(region);
    ++region_count_;
  }
  if (drop_empty) empty_region_count_ = 0;
}

// Twice as many as before: a region with few blocks stays small.
void BlockTable::add_records(Region& region) {
  constexpr std::size_t kMinRecords = 4;
  Storage& storage = *region.storage;
  const std::size_t count = std::max(kMinRecords, storage.record_count);
  storage.chunks.reserve(storage.chunks.size() + 1);
  storage.chunks.push_back(std::make_unique<Block[]>(count));
  storage.record_count += count;
  Block* chunk = storage.chunks.back().get();
  for (std::size_t i = count; i-- > 0;) chunk[i].next = std::exchange(storage.spare, &chunk[i]);
}

void BlockTable::grow_index(Region& region) {
  const std::size_t old_size = static_cast<std::size_t>(region.mask) + 1;
  auto old = std::make_unique<std::uint64_t[]>(old_size * 2);
  old.swap(region.slots);
  region.mask = static_cast<std::uint32_t>(old_size * 2 - 1);
  for (std::size_t i = 0; i < old_size; ++i) {
    if (old[i] != 0) place(region, old[i], (old[i] >> 52) << kGranuleShift);
  }
}

void BlockTable::place(Region& region, std::uint64_t slot, std::uintptr_t address) noexcept {
  std::size_t i = home(address, region.mask);
  while (region.slots[i] != 0) i = (i + 1) & region.mask;
  region.slots[i] = slot;
}

}  // namespace mybackend::caching
