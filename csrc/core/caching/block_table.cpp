#include "core/caching/block_table.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "core/caching/expandable_range.h"

namespace mybackend::caching {

BlockTable::~BlockTable() {
  for (const Slot& slot : slots_) {
    if (!slot.is_used()) continue;
    if (!slot.is_fine()) {
      free_leaf(slot.leaf());
      continue;
    }
    for (Leaf* leaf : slot.directory().leaves) {
      if (leaf != nullptr) free_leaf(leaf);
    }
    delete &slot.directory();
  }
}

Block BlockTable::begin(Segment* segment) {
  return insert(segment, segment->address, Block::kFree, nullptr);
}

Block BlockTable::divide(Block& block, std::size_t bytes) {
  return insert(block.leaf_->segment, block.address() + bytes, static_cast<std::uint16_t>(block.tag() & Block::kUnmapped), &block);
}

// `before`: the block that reaches over the address; nullptr for the first one of a segment.
Block BlockTable::insert(Segment* segment, std::uintptr_t address, std::uint16_t state, Block* before) {
  Leaf* leaf = nullptr;
  if (before != nullptr && before->leaf_->covers(address) && before->leaf_->count < before->leaf_->capacity) {
    leaf = before->leaf_;
  } else {
    leaf = leaf_with_room(segment, address, before);
  }
  // Nothing below can fail.
  const std::uint32_t index = before != nullptr && before->leaf_ == leaf ? before->index_ + 1 : 0;
  if (index < leaf->count) {
    std::copy_backward(leaf->tags() + index, leaf->tags() + leaf->count, leaf->tags() + leaf->count + 1);
    std::copy_backward(leaf->values() + index, leaf->values() + leaf->count, leaf->values() + leaf->count + 1);
  }
  leaf->tags()[index] = static_cast<std::uint16_t>(((address - leaf->address) >> Leaf::kGranuleShift << Leaf::kStateBits) | state);
  leaf->values()[index] = 0;
  ++leaf->count;
  ++size_;
  return {leaf, index};
}

// Where a start at the address belongs; made, made larger or divided as needed. *before is moved
// along.
Leaf* BlockTable::leaf_with_room(Segment* segment, std::uintptr_t address, Block* before) {
  const std::uint64_t number = address >> kRegionShift;
  Slot* slot = find_slot(number, segment);
  if (slot != nullptr && !slot->is_fine() && slot->leaf()->count == Leaf::kMaxBlocks) {
    const std::uintptr_t at = before->address();
    make_fine(*slot);
    *before = find(at);
  }
  Leaf* leaf = slot != nullptr ? slot->leaf_at(address) : nullptr;
  if (leaf == nullptr) {
    constexpr std::size_t kMinBlocks = 8;
    const bool is_fine = slot != nullptr;
    const int shift = is_fine ? kFineShift : kRegionShift;
    if (slot == nullptr) slot = &make_slot(number);
    leaf = make_leaf(address >> shift << shift, segment, is_fine, kMinBlocks);
    link(leaf, before != nullptr ? before->leaf_ : nullptr);
    slot->set_leaf_at(address, leaf);
    if (is_fine) ++slot->directory().leaf_count;
  } else if (leaf->count == leaf->capacity) {
    Leaf* larger = grow(leaf);
    slot->set_leaf_at(address, larger);
    if (before != nullptr && before->leaf_ == leaf) before->leaf_ = larger;
    leaf = larger;
  }
  return leaf;
}

void BlockTable::end(Block block) noexcept {
  drop_extra(block);
  if ((block.tag() & Block::kExtra) != 0) {  // kept for a large request
    extras_[block.value()].requested_bytes = 0;
    drop_extra(block);
  }
  Leaf* const leaf = block.leaf_;
  --size_;
  if (leaf->count > 1) {
    if (block.index_ + 1u < leaf->count) {
      std::copy(leaf->tags() + block.index_ + 1, leaf->tags() + leaf->count, leaf->tags() + block.index_);
      std::copy(leaf->values() + block.index_ + 1, leaf->values() + leaf->count, leaf->values() + block.index_);
    }
    leaf->tags()[--leaf->count] = kNoTag;
    return;
  }
  Slot& slot = *find_slot(leaf->address >> kRegionShift, leaf->segment);
  slot.set_leaf_at(leaf->address, nullptr);
  if (slot.is_fine() && --slot.directory().leaf_count == 0) {
    delete &slot.directory();
    slot.record = 0;
  }
  unlink(leaf);
  free_leaf(leaf);
}

// --- Extras -----------------------------------------------------------------------------------

void BlockTable::set_requested_bytes(Block block, std::size_t bytes) {
  if ((block.tag() & Block::kExtra) != 0) {
    extras_[block.value()].requested_bytes = bytes;
  } else if (bytes <= std::numeric_limits<std::uint32_t>::max()) {
    block.value() = static_cast<std::uint32_t>(bytes);
  } else {
    need_extra(block).requested_bytes = bytes;
  }
}

BlockExtra& BlockTable::need_extra(Block block) {
  if (BlockExtra* present = extra(block)) return *present;
  if (spare_extras_.empty()) {
    spare_extras_.reserve(extras_.size() + 1 > spare_extras_.capacity() ? 2 * extras_.size() + 16 : 0);
    extras_.emplace_back();
    spare_extras_.push_back(static_cast<std::uint32_t>(extras_.size() - 1));
  }
  const std::uint32_t number = spare_extras_.back();
  spare_extras_.pop_back();
  extras_[number].requested_bytes = block.value();
  block.value() = number;
  block.tag() |= Block::kExtra;
  return extras_[number];
}

void BlockTable::drop_extra(Block block) noexcept {
  BlockExtra* present = extra(block);
  if (present == nullptr) return;
  present->stream_uses.clear();
  present->event_count = 0;
  present->markers.clear();
  present->context.reset();
  if (present->requested_bytes > std::numeric_limits<std::uint32_t>::max()) return;
  const std::uint32_t number = block.value();
  block.value() = static_cast<std::uint32_t>(present->requested_bytes);
  block.tag() = static_cast<std::uint16_t>(block.tag() & ~Block::kExtra);
  spare_extras_.push_back(number);
}

// --- Leaves -----------------------------------------------------------------------------------

Leaf* BlockTable::make_leaf(std::uintptr_t address, Segment* segment, bool is_fine, std::size_t capacity) {
  constexpr std::size_t kBlockBytes = sizeof(std::uint16_t) + sizeof(std::uint32_t);
  auto* leaf = new (::operator new(sizeof(Leaf) + capacity * kBlockBytes)) Leaf{
      address, segment, segment->pool, segment->stream, segment->expandable != nullptr, is_fine, 0, static_cast<std::uint16_t>(capacity),
      nullptr, nullptr};
  std::fill_n(leaf->tags(), capacity, kNoTag);
  return leaf;
}

void BlockTable::free_leaf(Leaf* leaf) noexcept {
  ::operator delete(leaf);
}

// Behind `before`; nullptr: as the first one of its segment.
void BlockTable::link(Leaf* leaf, Leaf* before) noexcept {
  leaf->previous = before;
  Leaf*& to = before != nullptr ? before->next : leaf->segment->first;
  leaf->next = to;
  to = leaf;
  if (leaf->next != nullptr) leaf->next->previous = leaf;
}

void BlockTable::unlink(Leaf* leaf) noexcept {
  (leaf->previous != nullptr ? leaf->previous->next : leaf->segment->first) = leaf->next;
  if (leaf->next != nullptr) leaf->next->previous = leaf->previous;
}

// The same leaf with room for more, in its place among the others; whoever found the old one by
// address has to be told.
Leaf* BlockTable::grow(Leaf* leaf) {
  const std::size_t capacity = leaf->capacity < 32 ? leaf->capacity * 2u : leaf->capacity + 32u;
  Leaf* larger = make_leaf(leaf->address, leaf->segment, leaf->is_fine, capacity);
  std::copy_n(leaf->tags(), leaf->count, larger->tags());
  std::copy_n(leaf->values(), leaf->count, larger->values());
  larger->count = leaf->count;
  Leaf* const before = leaf->previous;
  unlink(leaf);
  link(larger, before);
  free_leaf(leaf);
  return larger;
}

void BlockTable::make_fine(Slot& slot) {
  Leaf* const leaf = slot.leaf();
  std::size_t counts[kFineCount] = {};
  for (std::size_t i = 0; i < leaf->count; ++i) ++counts[fine_index(leaf->start(i))];
  auto* directory = new Directory{leaf->segment, 0, {}};
  try {
    for (std::size_t i = 0; i < kFineCount; ++i) {
      if (counts[i] == 0) continue;
      const std::size_t capacity = std::min<std::size_t>((counts[i] + 8) / 8 * 8, Leaf::kMaxBlocks);
      directory->leaves[i] = make_leaf(leaf->address + (i << kFineShift), leaf->segment, true, capacity);
      ++directory->leaf_count;
    }
  } catch (...) {
    for (Leaf* made : directory->leaves) {
      if (made != nullptr) free_leaf(made);
    }
    delete directory;
    throw;
  }
  for (std::size_t i = 0; i < leaf->count; ++i) {
    Leaf* to = directory->leaves[fine_index(leaf->start(i))];
    to->tags()[to->count] =
        static_cast<std::uint16_t>(leaf->tags()[i] - ((to->address - leaf->address) >> Leaf::kGranuleShift << Leaf::kStateBits));
    to->values()[to->count++] = leaf->values()[i];
  }
  Leaf* before = leaf->previous;
  unlink(leaf);
  for (Leaf* made : directory->leaves) {
    if (made == nullptr) continue;
    link(made, before);
    before = made;
  }
  slot.set(directory);
  free_leaf(leaf);
}

// --- Slots ------------------------------------------------------------------------------------

BlockTable::Slot* BlockTable::find_slot(std::uint64_t number, const Segment* segment) noexcept {
  for (std::size_t i = home(number); slots_[i].number != 0; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].number == number && slots_[i].is_used() && slots_[i].segment() == segment) return &slots_[i];
  }
  return nullptr;
}

// One without leaves, for this number.
BlockTable::Slot& BlockTable::make_slot(std::uint64_t number) {
  std::size_t i = home(number);
  for (; slots_[i].number != 0; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].number == number && !slots_[i].is_used()) return slots_[i];
  }
  if ((used_slot_count_ + 1) * 2 > slots_.size()) {
    rehash();
    for (i = home(number); slots_[i].number != 0;) i = (i + 1) & (slots_.size() - 1);
  }
  slots_[i].number = number;
  ++used_slot_count_;
  return slots_[i];
}

// Drops the slots that nothing uses; larger when those were few. (They are kept until then: their
// addresses are probably used again.)
void BlockTable::rehash() {
  const auto used = static_cast<std::size_t>(std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.is_used(); }));
  std::vector<Slot> old(used * 4 > slots_.size() ? slots_.size() * 2 : slots_.size());
  old.swap(slots_);
  used_slot_count_ = used;
  for (const Slot& slot : old) {
    if (!slot.is_used()) continue;
    std::size_t i = home(slot.number);
    while (slots_[i].number != 0) i = (i + 1) & (slots_.size() - 1);
    slots_[i] = slot;
  }
}

}  // namespace mybackend::caching
