#include "core/caching/block_table.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "core/caching/expandable_range.h"

namespace mybackend::caching {

BlockTable::~BlockTable() {
  for (const NodeRef& ref : nodes_) {
    if (ref.node == nullptr) continue;
    for (Record record : ref.node->entries) {
      while (record) {  // leaves go with the arena
        const Record next = record.sibling();
        if (record.is_fine()) delete record.directory();
        record = next;
      }
    }
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
  const std::size_t index = before != nullptr && before->leaf_ == leaf ? before->index_ + 1 : 0;
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
  Record* record = find_record(address, segment);
  if (record != nullptr && !record->is_fine() && record->leaf()->count == Leaf::kMaxBlocks) {
    const std::uintptr_t at = before->address();
    make_fine(*record);
    *before = find(at);
  }
  Leaf* leaf = record != nullptr ? record->leaf_at(address) : nullptr;
  if (leaf == nullptr) {
    const bool is_fine = record != nullptr;
    const int shift = is_fine ? Leaf::kFineShift : Leaf::kRegionShift;
    Node* node = is_fine ? nullptr : &make_node(address);
    leaf = make_leaf(address >> shift << shift, segment, is_fine, 1);
    link(leaf, before != nullptr ? before->leaf_ : nullptr);
    if (is_fine) {
      record->set_leaf_at(address, leaf);
      ++record->directory()->leaf_count;
    } else {
      add_record(*node, address, Record(leaf));
    }
  } else if (leaf->count == leaf->capacity) {
    Leaf* larger = grow(leaf);
    record->set_leaf_at(address, larger);
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
  Record* record = find_record(leaf->address, leaf->segment);
  if (!record->is_fine()) {
    remove_record(leaf->address, record);
  } else {
    Directory* directory = record->directory();
    directory->leaves[Directory::index_of(leaf->address)] = nullptr;
    if (--directory->leaf_count == 0) {
      remove_record(leaf->address, record);
      delete directory;
    }
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

Leaf* BlockTable::make_leaf(std::uintptr_t address, Segment* segment, bool is_fine, std::size_t min_capacity) {
  // Multiples of 8, of which little of a line is left over.
  static constexpr std::size_t kCapacities[] = {8, 16, 24, 40, 56, 72, 88, 104, Leaf::kMaxBlocks};
  const std::size_t capacity = *std::lower_bound(std::begin(kCapacities), std::end(kCapacities), min_capacity);
  Leaf* leaf = new (arena_.allocate(Leaf::lines_for(capacity))) Leaf{
      address, segment, segment->pool, segment->stream, segment->expandable != nullptr, is_fine, 0, static_cast<std::uint16_t>(capacity),
      nullptr, nullptr, Record()};
  std::fill_n(leaf->tags(), capacity, kNoTag);
  ++leaf_count_;
  return leaf;
}

void BlockTable::free_leaf(Leaf* leaf) noexcept {
  arena_.deallocate(leaf, leaf->lines());
  --leaf_count_;
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
  Leaf* larger = make_leaf(leaf->address, leaf->segment, leaf->is_fine, leaf->capacity + 1u);
  std::copy_n(leaf->tags(), leaf->count, larger->tags());
  std::copy_n(leaf->values(), leaf->count, larger->values());
  larger->count = leaf->count;
  larger->sibling = leaf->sibling;
  Leaf* const before = leaf->previous;
  unlink(leaf);
  link(larger, before);
  free_leaf(leaf);
  return larger;
}

void BlockTable::make_fine(Record& record) {
  Leaf* const leaf = record.leaf();
  std::size_t counts[Directory::kCount] = {};
  for (std::size_t i = 0; i < leaf->count; ++i) ++counts[Directory::index_of(leaf->start(i))];
  auto directory = std::make_unique<Directory>();
  directory->segment = leaf->segment;
  directory->sibling = leaf->sibling;
  try {
    for (std::size_t i = 0; i < Directory::kCount; ++i) {
      if (counts[i] == 0) continue;
      const std::size_t room = std::min<std::size_t>(counts[i] + 1, Leaf::kMaxBlocks);
      directory->leaves[i] = make_leaf(leaf->address + (i << Leaf::kFineShift), leaf->segment, true, room);
      ++directory->leaf_count;
    }
  } catch (...) {
    for (Leaf* made : directory->leaves) {
      if (made != nullptr) free_leaf(made);
    }
    throw;
  }
  for (std::size_t i = 0; i < leaf->count; ++i) {
    Leaf* to = directory->leaves[Directory::index_of(leaf->start(i))];
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
  record = Record(directory.release());
  free_leaf(leaf);
}

// --- Records by address -----------------------------------------------------------------------

Record* BlockTable::find_record(std::uintptr_t address, const Segment* segment) noexcept {
  Node* node = find_node(address);
  if (node == nullptr) return nullptr;
  for (Record* record = &node->entries[Node::index_of(address)]; *record; record = &record->sibling()) {
    if (record->segment() == segment) return record;
  }
  return nullptr;
}

void BlockTable::add_record(Node& node, std::uintptr_t address, Record record) noexcept {
  Record& entry = node.entries[Node::index_of(address)];
  if (!entry) ++node.used_count;
  record.sibling() = entry;
  entry = record;
}

void BlockTable::remove_record(std::uintptr_t address, Record* record) noexcept {
  *record = record->sibling();
  Node& node = *find_node(address);
  if (!node.entries[Node::index_of(address)]) --node.used_count;
}

BlockTable::Node& BlockTable::make_node(std::uintptr_t address) {
  if (Node* present = find_node(address)) return *present;
  auto made = std::make_unique<Node>(address >> Node::kShift);
  if ((node_count_ + 1) * 2 > nodes_.size()) {
    // Nodes that nothing uses are kept until now: their addresses are often used again.
    const auto is_used = [](const NodeRef& ref) { return ref.node != nullptr && ref.node->used_count > 0; };
    const auto used = static_cast<std::size_t>(std::count_if(nodes_.begin(), nodes_.end(), is_used));
    std::vector<NodeRef> old(used * 4 > nodes_.size() ? nodes_.size() * 2 : nodes_.size());
    old.swap(nodes_);
    node_count_ = 0;
    for (NodeRef& ref : old) {
      if (is_used(ref)) place_node(std::move(ref.node));
    }
  }
  Node& node = *made;
  place_node(std::move(made));
  return node;
}

void BlockTable::place_node(std::unique_ptr<Node> node) noexcept {
  std::size_t i = node->number & (nodes_.size() - 1);
  while (nodes_[i].node != nullptr) i = (i + 1) & (nodes_.size() - 1);
  nodes_[i].number = node->number;
  nodes_[i].node = std::move(node);
  ++node_count_;
}

}  // namespace mybackend::caching
