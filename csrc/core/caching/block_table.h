// The records of all blocks, packed: with many live blocks every record that is looked at is a
// memory access, so what belongs together has to be together, and small.
//
// A block is a start: it reaches to the next one of its segment. Starts are kept in leaves, sorted,
// 2 bytes each (where in the leaf's span, and the state), beside the requested size: 2 bytes as long
// as all of the leaf fit in those, else 4. So a block, its neighbours and their sizes are on a line
// or two, and as many as possible of all of them in the processor's cache. What few blocks have
// (streams, events, contexts, a request above 4 GiB) is a BlockExtra, whose number stands instead of
// the requested size.
//
// A leaf covers 2 MiB of one segment, or, where more than kMaxBlocks blocks start in those, half of
// them, and so on down to 64 KiB, which cannot have more: so leaves are well filled whatever the
// sizes are. Only leaves with a start exist; those of a segment are linked by address. Two steps by
// address find them: a node for each 2 GiB, in it an entry for each 2 MiB; where those have several
// leaves, the entry leads to a directory of them. An entry also tells the leaf's capacity, so that
// all of its lines can be asked for before its header is there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "core/caching/block.h"
#include "core/caching/record_arena.h"

namespace mybackend::caching {

// What few blocks have.
struct BlockExtra {
  std::size_t requested_bytes = 0;
  std::vector<StreamHandle> stream_uses;  // streams that record_stream named, no duplicates
  std::int64_t event_count = 0;           // outstanding events of streams that used it
  std::vector<CaptureMarker> markers;     // freed in a capture: behind its last use on each stream
  Context context;                        // of its allocation
};

struct Directory;

// Leads to a Leaf, to a Directory, or to nothing: what an address's 2 MiB have for one segment.
class Record {
 public:
  Record() = default;
  explicit Record(Leaf* leaf) noexcept;
  explicit Record(Directory* directory) noexcept : bits_(reinterpret_cast<std::uintptr_t>(directory) | kDirectory) {}
  explicit operator bool() const noexcept { return bits_ != 0; }

  bool is_directory() const noexcept { return (bits_ & kDirectory) != 0; }
  Leaf* leaf() const noexcept { return reinterpret_cast<Leaf*>(bits_ & ~kMask); }
  Directory* directory() const noexcept { return reinterpret_cast<Directory*>(bits_ & ~kMask); }
  const Segment* segment() const noexcept;
  // Two segments that are not aligned can share 2 MiB: the other's.
  Record& sibling() const noexcept;
  // That of the leaf that covers the address; none where there is none.
  Record at(std::uintptr_t address) const noexcept;
  // Of a leaf: asks the memory for all of its lines together.
  void prefetch() const noexcept;

 private:
  static constexpr std::uintptr_t kDirectory = 1;
  static constexpr std::uintptr_t kMask = RecordArena::kLineBytes - 1;  // of a leaf: a quarter of its capacity

  std::uintptr_t bits_ = 0;
};

// A leaf's header, one line; tags and values follow it.
struct Leaf {
  static constexpr std::size_t kMaxBlocks = 128;
  static constexpr int kGranuleShift = 9;
  static constexpr int kMaxShift = 21;  // of its span
  static constexpr int kMinShift = 16;
  // A tag: the block's start in granules of 512 bytes from the leaf's address, then its state.
  static constexpr int kStateBits = 4;
  static constexpr std::uint16_t kNoTag = 0xFFFF;
  static constexpr std::size_t kMaxNarrowValue = std::numeric_limits<std::uint16_t>::max();
  static constexpr std::size_t kMaxValue = std::numeric_limits<std::uint32_t>::max();

  std::uintptr_t address;  // of its span, a multiple of that
  Segment* segment;
  BlockPool* pool;  // these are the segment's: it would be a memory access more
  StreamHandle stream;
  bool is_expandable;
  std::uint8_t shift;   // of its span
  bool is_wide;         // values of 4 bytes, not 2. No branch may depend on it: leaves of both kinds alternate
  std::uint16_t count;  // blocks that start in the span
  std::uint16_t capacity;
  Leaf* previous;  // of the segment, by address
  Leaf* next;
  Record sibling;  // unused below a directory

  static constexpr std::size_t lines_for(std::size_t capacity, bool is_wide) noexcept {
    const std::size_t block_bytes = sizeof(std::uint16_t) + (is_wide ? sizeof(std::uint32_t) : sizeof(std::uint16_t));
    return 1 + (capacity * block_bytes + RecordArena::kLineBytes - 1) / RecordArena::kLineBytes;
  }
  std::size_t lines() const noexcept { return lines_for(capacity, is_wide); }

  // Ascending; behind the last: kNoTag.
  std::uint16_t* tags() noexcept { return reinterpret_cast<std::uint16_t*>(this + 1); }
  const std::uint16_t* tags() const noexcept { return reinterpret_cast<const std::uint16_t*>(this + 1); }
  // A value: the requested bytes, or with kExtra the number of a BlockExtra.
  std::uint32_t value(std::size_t index) const noexcept {
    // A narrow one is the upper half of the 4 bytes that end with it.
    const int before_it = is_wide ? 0 : 2;
    std::uint32_t bytes;
    std::memcpy(&bytes, value_at(index) - before_it, sizeof bytes);
    return bytes >> (8 * before_it);
  }
  bool fits(std::size_t value) const noexcept { return value >> (16 << is_wide) == 0; }
  void set_value(std::size_t index, std::uint32_t value) noexcept {  // which fits
    const auto lower = static_cast<std::uint16_t>(value), upper = static_cast<std::uint16_t>(value >> 16);
    std::byte* const to = value_at(index);
    std::memcpy(to + 2 * is_wide, &upper, sizeof upper);  // of a narrow one overwritten at once
    std::memcpy(to, &lower, sizeof lower);
  }
  // With room for one more.
  void insert(std::size_t index, std::uint16_t tag, std::uint32_t value) noexcept {
    if (index < count) {
      std::copy_backward(tags() + index, tags() + count, tags() + count + 1);
      std::memmove(value_at(index + 1), value_at(index), static_cast<std::size_t>(value_at(count) - value_at(index)));
    }
    tags()[index] = tag;
    set_value(index, value);
    ++count;
  }
  void remove(std::size_t index) noexcept {
    if (index + 1u < count) {
      std::copy(tags() + index + 1, tags() + count, tags() + index);
      std::memmove(value_at(index), value_at(index + 1), static_cast<std::size_t>(value_at(count) - value_at(index + 1)));
    }
    tags()[--count] = kNoTag;
  }
  std::uintptr_t start(std::size_t index) const noexcept {
    return address + (static_cast<std::uintptr_t>(tags()[index] >> kStateBits) << kGranuleShift);
  }
  bool covers(std::uintptr_t at) const noexcept { return (at - address) >> shift == 0; }
  // The first block that does not start before `at`, which it covers.
  std::size_t place_of(std::uintptr_t at) const noexcept {
    const auto key = static_cast<std::uint16_t>((at - address) >> kGranuleShift << kStateBits);
    // A line of tags is counted, eight at a time, instead of a binary search: the line in which it would
    // be were all blocks alike, or one beside that.
    constexpr std::size_t kLineTags = RecordArena::kLineBytes / sizeof(std::uint16_t);
    std::size_t line = ((at - address) * count >> shift) / kLineTags;
    while (line > 0 && tags()[line * kLineTags] >= key) --line;
    for (;; ++line) {
      const std::size_t end = std::min<std::size_t>(count, (line + 1) * kLineTags);
      const std::size_t below = count_below(key, line * kLineTags, end);
      if (below < kLineTags || end == count) return line * kLineTags + below;
    }
  }

 private:
  // How many tags from `begin` to `end` (or beside those kNoTag) are below the key; at most a line of them.
  std::size_t count_below(std::uint16_t key, std::size_t begin, std::size_t end) const noexcept {
    using Eight [[gnu::vector_size(16)]] = std::uint16_t;
    Eight below = {};  // how many in each lane
    for (std::size_t i = begin; i < end; i += 8) {
      Eight some;
      std::memcpy(&some, tags() + i, sizeof some);
      below -= reinterpret_cast<Eight>(some < key);  // true is all ones: -1
    }
    std::uint64_t sums[2];  // four lanes each
    std::memcpy(sums, &below, sizeof sums);
    sums[0] += sums[1];
    sums[0] += sums[0] >> 32;
    return static_cast<std::size_t>((sums[0] + (sums[0] >> 16)) & 0xFFFF);
  }
  std::byte* value_at(std::size_t index) const noexcept {
    return reinterpret_cast<std::byte*>(const_cast<std::uint16_t*>(tags()) + capacity) + (index << (1 + is_wide));
  }
};

static_assert(sizeof(Leaf) == RecordArena::kLineBytes);
static_assert(Leaf::lines_for(Leaf::kMaxBlocks, true) <= RecordArena::kMaxLines);

// The leaves of 2 MiB of a segment, by 64 KiB: one of a larger span stands there several times.
struct Directory {
  static constexpr std::size_t kCount = std::size_t{1} << (Leaf::kMaxShift - Leaf::kMinShift);
  static std::size_t index_of(std::uintptr_t address) noexcept { return (address >> Leaf::kMinShift) & (kCount - 1); }
  // How many entries a leaf has.
  static std::size_t count_for(int shift) noexcept { return std::size_t{1} << (shift - Leaf::kMinShift); }

  Segment* segment;
  std::size_t leaf_count = 0;
  Record sibling;
  Record entries[kCount] = {};

  void set(std::uintptr_t address, int shift, Record record) noexcept {
    std::fill_n(entries + index_of(address), count_for(shift), record);
  }
  // The largest span with the address in which there is no leaf; there is none at the address.
  int free_shift(std::uintptr_t address) const noexcept;

  static constexpr std::size_t lines() noexcept;
};
constexpr std::size_t Directory::lines() noexcept {
  return (sizeof(Directory) + RecordArena::kLineBytes - 1) / RecordArena::kLineBytes;
}
static_assert(Directory::lines() <= RecordArena::kMaxLines);
static_assert(std::is_trivially_destructible_v<Directory>);  // they go with the arena, as leaves do

inline Record::Record(Leaf* leaf) noexcept : bits_(reinterpret_cast<std::uintptr_t>(leaf) | leaf->capacity / 4u) {}
inline void Record::prefetch() const noexcept {
  const char* header = reinterpret_cast<const char*>(bits_ & ~kMask);
  // A narrow leaf's end; of a wide one, a third is beyond.
  const char* end = header + sizeof(Leaf) + (bits_ & kMask) * 4 * 2 * sizeof(std::uint16_t);
  for (const char* line = header; line < end; line += RecordArena::kLineBytes) __builtin_prefetch(line);
}
inline const Segment* Record::segment() const noexcept {
  return is_directory() ? directory()->segment : leaf()->segment;
}
inline Record& Record::sibling() const noexcept {
  return is_directory() ? directory()->sibling : leaf()->sibling;
}
inline Record Record::at(std::uintptr_t address) const noexcept {
  return is_directory() ? directory()->entries[Directory::index_of(address)] : *this;
}

// One block: where its record is. Small, to be copied. It is good until a block of the same leaf
// begins or ends before it (BlockTable::divide and ::end say more), or gets a number for which the
// leaf has to be widened (::set_requested_bytes, ::need_extra); an address is good for longer.
class Block {
 public:
  enum State : std::uint16_t {
    kFree = 0,       // in its pool's free set, or unmapped
    kAllocated = 1,  // handed out
    kWaiting = 2,    // freed, but another stream still uses it
  };

  Block() = default;
  Block(Leaf* leaf, std::size_t index) noexcept : leaf_(leaf), index_(index) {}
  explicit operator bool() const noexcept { return leaf_ != nullptr; }
  bool operator==(const Block&) const = default;

  std::uintptr_t address() const noexcept { return leaf_->start(index_); }
  std::uintptr_t end() const noexcept {
    if (index_ + 1u < leaf_->count) return leaf_->start(index_ + 1);
    return leaf_->next != nullptr ? leaf_->next->start(0) : leaf_->segment->address + leaf_->segment->bytes;
  }
  std::size_t bytes() const noexcept { return end() - address(); }
  Block next() const noexcept {
    if (index_ + 1u < leaf_->count) return {leaf_, index_ + 1};
    return {leaf_->next, 0};
  }
  Block previous() const noexcept {
    if (index_ > 0) return {leaf_, index_ - 1};
    return leaf_->previous != nullptr ? Block(leaf_->previous, leaf_->previous->count - 1u) : Block();
  }
  Segment& segment() const noexcept { return *leaf_->segment; }
  StreamHandle stream() const noexcept { return leaf_->stream; }
  BlockPool& pool() const noexcept { return *leaf_->pool; }
  bool is_expandable() const noexcept { return leaf_->is_expandable; }
  bool is_split() const noexcept { return leaf_->count > 1 || leaf_->previous != nullptr || leaf_->next != nullptr; }

  bool is_allocated() const noexcept { return (tag() & kStateMask) == kAllocated; }
  // Free to be merged or built upon: not handed out, and no stream still uses it.
  bool is_available() const noexcept { return (tag() & kStateMask) == kFree; }
  bool is_mapped() const noexcept { return (tag() & kUnmapped) == 0; }
  void set_state(State state) const noexcept { tag() = static_cast<std::uint16_t>((tag() & ~kStateMask) | state); }
  void set_mapped(bool mapped) const noexcept { tag() = static_cast<std::uint16_t>(mapped ? tag() & ~kUnmapped : tag() | kUnmapped); }

 private:
  friend class BlockTable;
  static constexpr std::uint16_t kStateMask = 3;
  static constexpr std::uint16_t kUnmapped = 4;
  static constexpr std::uint16_t kExtra = 8;

  std::uint16_t& tag() const noexcept { return leaf_->tags()[index_]; }
  std::uint32_t value() const noexcept { return leaf_->value(index_); }

  Leaf* leaf_ = nullptr;
  std::size_t index_ = 0;  // a full word: it is stored and then loaded as one
};

class BlockTable {
 public:
  BlockTable() : nodes_(kMinNodes) {}
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // The block that starts at `address`; none when there is none.
  Block find(std::uintptr_t address) const noexcept {
    if ((address & (kGranuleBytes - 1)) != 0) return {};
    const Node* node = find_node(address);
    if (node == nullptr) return {};
    for (Record record = node->entries[Node::index_of(address)]; record; record = record.sibling()) {
      const Record at = record.at(address);
      if (!at) continue;
      if (leaf_count_ > kCachedLeaves) at.prefetch();
      Leaf* leaf = at.leaf();
      const std::size_t place = leaf->place_of(address);
      if (place < leaf->count && leaf->start(place) == address) return {leaf, place};
    }
    return {};
  }
  static Block first(const Segment& segment) noexcept { return {segment.first, 0}; }

  // The one block, free and mapped, of a segment that has none; address and bytes are multiples of
  // 512.
  Block begin(Segment* segment);
  // The block keeps its first `bytes` (a multiple of 512); the rest becomes a free block in the
  // same mapped state, with the same requested bytes or 0. `block` stays good; other Blocks of its
  // segment do not.
  Block divide(Block& block, std::size_t bytes);
  Block divide_alike(Block& block, std::size_t bytes);
  // The block ends, and its predecessor reaches over it. (The last one of a segment: nothing is
  // left.) Blocks before it stay good.
  void end(Block block) noexcept;

  std::size_t requested_bytes(Block block) const noexcept {
    return (block.tag() & Block::kExtra) != 0 ? extras_[block.value()].requested_bytes : block.value();
  }
  // Returns where the block is then; other Blocks of its leaf may not be good any more. (Not by
  // reference: a Block whose address is taken is not kept in registers.)
  [[nodiscard]] Block set_requested_bytes(Block block, std::size_t bytes) {
    if ((block.tag() & Block::kExtra) != 0 || !block.leaf_->fits(bytes)) [[unlikely]]
      return change_requested_bytes(block, bytes);
    block.leaf_->set_value(block.index_, static_cast<std::uint32_t>(bytes));
    return block;
  }
  // nullptr when it has none.
  BlockExtra* extra(Block block) noexcept { return (block.tag() & Block::kExtra) != 0 ? &extras_[block.value()] : nullptr; }
  const BlockExtra* extra(Block block) const noexcept { return const_cast<BlockTable*>(this)->extra(block); }
  // `block` stays good; other Blocks of its leaf may not.
  BlockExtra& need_extra(Block& block);
  // Keeps the requested bytes.
  void drop_extra(Block block) noexcept;

  std::size_t size() const noexcept { return size_; }

 private:
  static constexpr std::uintptr_t kGranuleBytes = std::uintptr_t{1} << Leaf::kGranuleShift;
  static constexpr std::size_t kMinNodes = 8;
  static constexpr std::size_t kCachedLeaves = 512;  // so few are in the processor's cache anyway

  // The entries of 2 GiB of addresses.
  struct Node {
    static constexpr int kShift = 31;
    static constexpr std::size_t kEntryCount = std::size_t{1} << (kShift - Leaf::kMaxShift);
    static std::size_t index_of(std::uintptr_t address) noexcept { return (address >> Leaf::kMaxShift) & (kEntryCount - 1); }

    explicit Node(std::uintptr_t n) noexcept : number(n) {}
    const std::uintptr_t number;  // the address by 2 GiB
    std::size_t used_count = 0;   // entries that lead somewhere
    Record entries[kEntryCount] = {};
  };
  // Open addressing with linear probing, at most half full: nodes of adjacent addresses are
  // neighbours, and usually each is where it belongs.
  struct NodeRef {
    std::uintptr_t number = 0;
    std::unique_ptr<Node> node;
  };

  Node* find_node(std::uintptr_t address) const noexcept {
    const std::uintptr_t number = address >> Node::kShift;
    for (std::size_t i = number & (nodes_.size() - 1); nodes_[i].node != nullptr; i = (i + 1) & (nodes_.size() - 1)) {
      if (nodes_[i].number == number) return nodes_[i].node.get();
    }
    return nullptr;
  }
  Node& make_node(std::uintptr_t address);
  void place_node(std::unique_ptr<Node> node) noexcept;
  // Where the segment's record at the address stands; nullptr: it has none.
  Record* find_record(std::uintptr_t address, const Segment* segment) noexcept;
  void add_record(Node& node, std::uintptr_t address, Record record) noexcept;
  void remove_record(std::uintptr_t address, Record* record) noexcept;

  Block insert(Segment* segment, std::uintptr_t address, std::uint16_t state, std::uint32_t value, Block* before);
  Leaf* leaf_with_room(Segment* segment, std::uintptr_t address, Block* before);
  Leaf* make_leaf(std::uintptr_t address, int shift, Segment* segment, bool is_wide, std::size_t min_capacity);
  void free_leaf(Leaf* leaf) noexcept;
  static void link(Leaf* leaf, Leaf* before) noexcept;
  static void unlink(Leaf* leaf) noexcept;
  bool needs_wide(Block block) const noexcept;
  Leaf* replace(Leaf* leaf, bool needs_wide, std::size_t min_capacity);
  void need_fit(Block& block, std::uint32_t value);
  Block change_requested_bytes(Block block, std::size_t bytes);
  void halve(Record& record, Leaf* leaf);

  RecordArena arena_;
  std::vector<NodeRef> nodes_;
  std::size_t node_count_ = 0;
  std::size_t leaf_count_ = 0;
  std::deque<BlockExtra> extras_;
  std::vector<std::uint32_t> spare_extras_;  // room for all of extras_
  std::size_t size_ = 0;
};

}  // namespace mybackend::caching
