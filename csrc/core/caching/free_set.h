// An ordered set of blocks by (stream, size, address): what best fit searches.
//
// Per stream: sizes up to 2 MiB have a bin each (they are multiples of 512 bytes), and two levels
// of bits tell which bins hold something, so that the best size is found without a comparison. A
// bin keeps its lowest address at hand, the others in a sorted list. Larger blocks are in one list
// by (size, address).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/caching/chunked_list.h"
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
  // Instead of erasing the member with this key and inserting `block` (of the same stream): a
  // large member often stays at its place in the order, and nothing moves.
  void replace(Key member, Block* block);

  // The smallest block of the stream with at least `bytes`, the lowest address first.
  Block* lower_bound(StreamHandle stream, std::size_t bytes) const noexcept;
  // The largest block of the stream that is smaller than `bytes`, the highest address first.
  Block* below(StreamHandle stream, std::size_t bytes) const noexcept;
  // Neighbours of a member in the order of its stream; nullptr at the ends.
  Block* after(const Block* block) const noexcept;
  Block* before(const Block* block) const noexcept;

  std::size_t size() const noexcept { return count_; }
  bool empty() const noexcept { return count_ == 0; }
  // All members in order. A copy: the caller may change the set while it walks.
  std::vector<Block*> blocks() const;

 private:
  static constexpr std::size_t kBinStepBytes = 512;
  static constexpr std::size_t kBinCount = 4096;  // the last: 2 MiB
  static constexpr std::size_t kPageBins = 64;
  static constexpr std::size_t kPageCount = kBinCount / kPageBins;

  struct BinEntry {
    std::uintptr_t address = 0;
    Block* block = nullptr;
    bool operator<(const BinEntry& other) const noexcept { return address < other.address; }
  };
  struct LargeEntry {
    std::size_t bytes = 0;
    std::uintptr_t address = 0;
    Block* block = nullptr;
    bool operator<(const LargeEntry& other) const noexcept { return bytes != other.bytes ? bytes < other.bytes : address < other.address; }
  };
  struct Bin {
    BinEntry lowest;                                // block: nullptr when the bin is empty
    std::unique_ptr<ChunkedList<BinEntry>> others;  // all above `lowest`; kept when it gets empty
  };
  using Page = std::array<Bin, kPageBins>;
  struct StreamSet {
    explicit StreamSet(StreamHandle s) : stream(s) {}
    StreamHandle stream;
    std::uint64_t used_pages = 0;              // bit i: used_bins[i] is not 0
    std::uint64_t used_bins[kPageCount] = {};  // bit j of i: bin 64 i + j is not empty
    std::unique_ptr<Page> pages[kPageCount];
    ChunkedList<LargeEntry> large;

    Bin& bin(std::size_t index) const noexcept { return (*pages[index / kPageBins])[index % kPageBins]; }
    bool is_used(std::size_t index) const noexcept { return (used_bins[index / kPageBins] >> (index % kPageBins) & 1) != 0; }
    // The first bin from `index` on that holds something, the last one before it; kBinCount: none.
    std::size_t used_from(std::size_t index) const noexcept;
    std::size_t used_before(std::size_t index) const noexcept;
    Block* highest_of(std::size_t index) const noexcept;

    void insert(std::size_t bytes, std::uintptr_t address, Block* block);
    bool erase(std::size_t bytes, std::uintptr_t address) noexcept;
    const Block* find(std::size_t bytes, std::uintptr_t address) const noexcept;
  };

  static bool has_bin(std::size_t bytes) noexcept { return bytes <= kBinCount * kBinStepBytes; }
  static std::size_t bin_of(std::size_t bytes) noexcept { return bytes / kBinStepBytes - 1; }
  StreamSet* find_stream(StreamHandle stream) const noexcept;

  std::vector<std::unique_ptr<StreamSet>> streams_;  // by stream
  std::size_t count_ = 0;
};

}  // namespace mybackend::caching
