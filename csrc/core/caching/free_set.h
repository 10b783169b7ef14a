// An ordered set of blocks by (stream, size, address): what best fit searches.
//
// Per stream, a list of sorted chunks of up to kChunkCapacity entries; a binary search finds
// the chunk, another one the place. The keys are copied into the chunks, so that a search
// touches a few adjacent cache lines and no block. Insertion and removal move at most one
// chunk's entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "driver/driver.h"

namespace mybackend::caching {

struct Block;

class FreeSet {
 public:
  FreeSet() = default;
  FreeSet(const FreeSet&) = delete;
  FreeSet& operator=(const FreeSet&) = delete;

  // A block's stream, size and address must not change while it is in a set.
  void insert(Block* block);
  // False when it was not in the set.
  bool erase(const Block* block) noexcept;
  bool contains(const Block* block) const noexcept;

  struct Key {
    std::size_t bytes;
    std::uintptr_t address;
  };
  static Key key(const Block* block) noexcept;
  // Instead of erasing the member with this key and inserting `block` (of the same stream): the
  // member often stays at its place in the order, and nothing moves.
  void replace(Key member, Block* block);

  // The smallest block of the stream with at least `bytes`, the lowest address first.
  Block* lower_bound(StreamHandle stream, std::size_t bytes) const noexcept;
  // The largest block of the stream that is smaller than `bytes`.
  Block* below(StreamHandle stream, std::size_t bytes) const noexcept;
  // Neighbours of a member in the order of its stream; nullptr at the ends.
  Block* after(const Block* block) const noexcept;
  Block* before(const Block* block) const noexcept;

  std::size_t size() const noexcept { return count_; }
  bool empty() const noexcept { return count_ == 0; }
  // All members in order. A copy: the caller may change the set while it walks.
  std::vector<Block*> blocks() const;

 private:
  static constexpr std::size_t kChunkCapacity = 64;

  struct Entry {
    std::size_t bytes;
    std::uintptr_t address;
    Block* block;
    bool operator<(const Entry& other) const noexcept { return bytes != other.bytes ? bytes < other.bytes : address < other.address; }
  };
  struct Chunk {
    std::size_t count = 0;
    Entry entries[kChunkCapacity];
  };
  struct ChunkRef {
    Entry last;  // copy of the chunk's largest entry
    std::unique_ptr<Chunk> chunk;
  };
  struct StreamList {
    StreamHandle stream;
    std::vector<ChunkRef> chunks;  // never holds an empty chunk
  };
  struct Place {
    std::size_t chunk = 0;
    std::size_t index = 0;  // first entry that is not less than the key
  };

  StreamList* find_stream(StreamHandle stream) noexcept;
  const StreamList* find_stream(StreamHandle stream) const noexcept;
  Place place_of(StreamList& list, const Entry& key) const noexcept;
  void insert_at(StreamList& list, const Entry& key);
  void erase_at(StreamList& list, const Place& place) noexcept;
  static Place find_place(const StreamList& list, const Entry& key) noexcept;
  static Entry key_of(const Block* block) noexcept;

  std::vector<StreamList> streams_;  // by stream
  std::size_t count_ = 0;
  // Where the last search ended. Only a hint: whoever uses it looks whether it still holds.
  mutable Place hint_;
};

}  // namespace mybackend::caching
