#include "core/caching/block_table.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "core/caching/expandable_range.h"

namespace mybackend::caching {

Block BlockTable::begin(Segment* segment) {
  return insert(segment, segment->address, Block::kFree, 0, nullptr);
}

Block BlockTable::divide(Block& block, std::size_t bytes) {
  return insert(block.leaf_->segment, block.address() + bytes, static_cast<std::uint16_t>(block.tag() & Block::kUnmapped), 0, &block);
}

Block BlockTable::divide_alike(Block& block, std::size_t bytes) {
  if ((block.tag() & Block::kExtra) == 0) {
    const auto state = static_cast<std::uint16_t>(block.tag() & Block::kUnmapped);
    return insert(block.leaf_->segment, block.address() + bytes, state, block.value(), &block);
  }
  Block rest = divide(block, bytes);
  Leaf* const leaf = rest.leaf_;
  rest = set_requested_bytes(rest, requested_bytes(block));
  if (block.leaf_ == leaf) block.leaf_ = rest.leaf_;
  return rest;
}

// `before`: the block that reaches over the address; nullptr for the first one of a segment.
Block BlockTable::insert(Segment* segment, std::uintptr_t address, std::uint16_t state, std::uint32_t value, Block* before) {
  Leaf* leaf = nullptr;
  if (before != nullptr && before->leaf_->covers(address) && before->leaf_->count < before->leaf_->capacity) {
    leaf = before->leaf_;
  } else {
    leaf = leaf_with_room(segment, address, before);
    if (!leaf->fits(value)) leaf = replace(leaf, true, leaf->count + 1u);  // so not *before's
  }
  // Nothing below can fail.
  const std::size_t index = before != nullptr && before->leaf_ == leaf ? before->index_ + 1 : 0;
  leaf->insert(index, static_cast<std::uint16_t>(((address - leaf->address) >> Leaf::kGranuleShift << Leaf::kStateBits) | state), value);
  ++size_;
  return {leaf, index};
}

// Where a start at the address belongs; made, made larger or divided as needed. *before is moved
// along.
Leaf* BlockTable::leaf_with_room(Segment* segment, std::uintptr_t address, Block* before) {
  Record* record = find_record(address, segment);
  Leaf* leaf = record != nullptr ? record->at(address).leaf() : nullptr;
  while (leaf != nullptr && leaf->count == Leaf::kMaxBlocks) {
    const std::uintptr_t at = before->address();
    halve(*record, leaf);
    *before = find(at);
    leaf = record->at(address).leaf();
  }
  if (leaf == nullptr) {
    const int shift = record != nullptr ? record->directory()->free_shift(address) : Leaf::kMaxShift;
    Node* node = record != nullptr ? nullptr : &make_node(address);
    leaf = make_leaf(address >> shift << shift, shift, segment, false, 1);
    link(leaf, before != nullptr ? before->leaf_ : nullptr);
    if (record != nullptr) {
      record->directory()->set(leaf->address, shift, Record(leaf));
      ++record->directory()->leaf_count;
    } else {
      add_record(*node, address, Record(leaf));
    }
  } else if (leaf->count == leaf->capacity) {
    const bool is_before = before != nullptr && before->leaf_ == leaf;
    leaf = replace(leaf, false, leaf->capacity + 1u);
    if (is_before) before->leaf_ = leaf;
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
    leaf->remove(block.index_);
    return;
  }
  Record* record = find_record(leaf->address, leaf->segment);
  if (!record->is_directory()) {
    remove_record(leaf->address, record);
  } else {
    Directory* directory = record->directory();
    directory->set(leaf->address, leaf->shift, Record());
    if (--directory->leaf_count == 0) {
      remove_record(leaf->address, record);
      arena_.deallocate(directory, Directory::lines());
    }
  }
  unlink(leaf);
  free_leaf(leaf);
}

// --- Extras -----------------------------------------------------------------------------------

void BlockTable::need_fit(Block& block, std::uint32_t value) {
  if (!block.leaf_->fits(value)) block.leaf_ = replace(block.leaf_, true, block.leaf_->count);
}

Block BlockTable::change_requested_bytes(Block block, std::size_t bytes) {
  if (bytes > Leaf::kMaxValue) {
    need_extra(block).requested_bytes = bytes;
    return block;
  }
  // Of an extra too: without it, the leaf has to hold them.
  need_fit(block, static_cast<std::uint32_t>(bytes));
  if (BlockExtra* present = extra(block))
    present->requested_bytes = bytes;
  else
    block.leaf_->set_value(block.index_, static_cast<std::uint32_t>(bytes));
  return block;
}

BlockExtra& BlockTable::need_extra(Block& block) {
  if (BlockExtra* present = extra(block)) return *present;
  if (spare_extras_.empty()) {
    spare_extras_.reserve(extras_.size() + 1 > spare_extras_.capacity() ? 2 * extras_.size() + 16 : 0);
    extras_.emplace_back();
    spare_extras_.push_back(static_cast<std::uint32_t>(extras_.size() - 1));
  }
  const std::uint32_t number = spare_extras_.back();
  const std::uint32_t requested = block.value();
  need_fit(block, number);
  block.leaf_->set_value(block.index_, number);
  spare_extras_.pop_back();
  extras_[number].requested_bytes = requested;
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
  if (present->requested_bytes > Leaf::kMaxValue) return;
  const std::uint32_t number = block.value();
  block.leaf_->set_value(block.index_, static_cast<std::uint32_t>(present->requested_bytes));
  block.tag() = static_cast<std::uint16_t>(block.tag() & ~Block::kExtra);
  spare_extras_.push_back(number);
}

// --- Leaves -----------------------------------------------------------------------------------

Leaf* BlockTable::make_leaf(std::uintptr_t address, int shift, Segment* segment, bool is_wide, std::size_t min_capacity) {
  // Multiples of 8; narrow leaves of 8 would be as large as those of 16.
  static constexpr std::size_t kCapacities[] = {8, 16, 32, 48, 64, 80, 96, 112, Leaf::kMaxBlocks};
  const std::size_t capacity = *std::lower_bound(std::begin(kCapacities) + (is_wide ? 0 : 1), std::end(kCapacities), min_capacity);
  Leaf* leaf = new (arena_.allocate(Leaf::lines_for(capacity, is_wide))) Leaf{address,
                                                                              segment,
                                                                              segment->pool,
                                                                              segment->stream,
                                                                              segment->expandable != nullptr,
                                                                              static_cast<std::uint8_t>(shift),
                                                                              is_wide,
                                                                              0,
                                                                              static_cast<std::uint16_t>(capacity),
                                                                              nullptr,
                                                                              nullptr,
                                                                              Record()};
  std::fill_n(leaf->tags(), capacity, Leaf::kNoTag);
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

bool BlockTable::needs_wide(Block block) const noexcept {
  // What an extra above 4 GiB holds never comes back into the leaf.
  const std::size_t requested = requested_bytes(block);
  return block.value() > Leaf::kMaxNarrowValue || (requested > Leaf::kMaxNarrowValue && requested <= Leaf::kMaxValue);
}

// The same leaf, narrow where it can be, else wide, and with room for at least so many, in its place
// among the others.
Leaf* BlockTable::replace(Leaf* leaf, bool needs_wide, std::size_t min_capacity) {
  for (std::size_t i = 0; i < leaf->count && !needs_wide; ++i) needs_wide = this->needs_wide({leaf, i});
  Leaf* made = make_leaf(leaf->address, leaf->shift, leaf->segment, needs_wide, min_capacity);
  for (std::size_t i = 0; i < leaf->count; ++i) made->insert(i, leaf->tags()[i], leaf->value(i));
  made->sibling = leaf->sibling;
  Leaf* const before = leaf->previous;
  unlink(leaf);
  link(made, before);
  Record* record = find_record(leaf->address, leaf->segment);
  if (record->is_directory())
    record->directory()->set(made->address, made->shift, Record(made));
  else
    *record = Record(made);
  free_leaf(leaf);
  return made;
}

// A full leaf becomes one for each half of its span in which blocks start.
void BlockTable::halve(Record& record, Leaf* leaf) {
  const int shift = leaf->shift - 1;
  const std::uintptr_t middle = leaf->address + (std::uintptr_t{1} << shift);
  const std::size_t ends[] = {leaf->place_of(middle), leaf->count};
  Leaf* made[] = {nullptr, nullptr};
  Directory* directory = record.is_directory() ? record.directory() : nullptr;
  try {
    for (std::size_t half = 0, i = 0; half < 2; i = ends[half++]) {
      if (i == ends[half]) continue;
      const std::size_t count = ends[half] - i;
      bool is_wide = false;
      for (std::size_t k = i; k < ends[half] && !is_wide; ++k) is_wide = needs_wide({leaf, k});
      const std::uintptr_t address = half == 0 ? leaf->address : middle;
      made[half] = make_leaf(address, shift, leaf->segment, is_wide, std::min(count + 1, Leaf::kMaxBlocks));
    }
    if (directory == nullptr) directory = new (arena_.allocate(Directory::lines())) Directory{leaf->segment, 1, leaf->sibling, {}};
  } catch (...) {
    for (Leaf* half : made) {
      if (half != nullptr) free_leaf(half);
    }
    throw;
  }
  Leaf* before = leaf->previous;
  unlink(leaf);
  --directory->leaf_count;
  directory->set(leaf->address, leaf->shift, Record());
  for (std::size_t half = 0, i = 0; half < 2; ++half) {
    Leaf* const to = made[half];
    if (to == nullptr) continue;
    const std::size_t before_it = (to->address - leaf->address) >> Leaf::kGranuleShift << Leaf::kStateBits;
    for (; i < ends[half]; ++i) to->insert(to->count, static_cast<std::uint16_t>(leaf->tags()[i] - before_it), leaf->value(i));
    link(to, before);
    before = to;
    directory->set(to->address, shift, Record(to));
    ++directory->leaf_count;
  }
  record = Record(directory);
  free_leaf(leaf);
}

int Directory::free_shift(std::uintptr_t address) const noexcept {
  int shift = Leaf::kMinShift;
  for (; shift < Leaf::kMaxShift; ++shift) {
    const Record* first = entries + index_of(address >> (shift + 1) << (shift + 1));
    if (std::any_of(first, first + count_for(shift + 1), [](Record entry) { return static_cast<bool>(entry); })) break;
  }
  return shift;
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
