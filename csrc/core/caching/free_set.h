// An ordered set of free blocks by (stream, size, address): what best fit searches.
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
#include <unordered_map>
#include <vector>

#include "core/caching/chunked_list.h"
#include "driver/driver.h"

namespace mybackend::caching {

class FreeSet {
 public:
  FreeSet() = default;
  FreeSet(const FreeSet&) = delete;
  FreeSet& operator=(const FreeSet&) = delete;

  // A block: its size (a multiple of 512, not 0) and address.
  struct Key {
    std::size_t bytes = 0;
    std::uintptr_t address = 0;
    explicit operator bool() const noexcept { return bytes != 0; }
    bool operator==(const Key&) const = default;
    bool operator<(const Key& other) const noexcept { return bytes != other.bytes ? bytes < other.bytes : address < other.address; }
  };

  void insert(StreamHandle stream, Key key);
  // False when it was not in the set.
  bool erase(StreamHandle stream, Key key) noexcept;
  bool contains(StreamHandle stream, Key key) const noexcept;
  // Instead of erasing `member` and inserting `key`: a large member often stays at its place in the
  // order, and nothing moves.
  void replace(StreamHandle stream, Key member, Key key);

  // The smallest block of the stream with at least `bytes`, the lowest address first; false: none.
  Key lower_bound(StreamHandle stream, std::size_t bytes) const noexcept;
  // The largest block of the stream that is smaller than `bytes`, the highest address first.
  Key below(StreamHandle stream, std::size_t bytes) const noexcept;
  // Neighbours of a member in the order of its stream; false at the ends.
  Key after(StreamHandle stream, Key member) const noexcept;
  Key before(StreamHandle stream, Key member) const noexcept;

  std::size_t size() const noexcept { return count_; }
  bool empty() const noexcept { return count_ == 0; }
  struct Member {
    StreamHandle stream;
    Key key;
  };
  // All in order. A copy: the caller may change the set while it walks.
  std::vector<Member> members() const;

  // --- Ages, for garbage collection -----------------------------------------------------------
  // The clock: a search while garbage collection is armed.
  void tick() noexcept { ++clock_; }
  // Ticks since the block at the address came into the set; of what is in no set: all ticks.
  std::int64_t age(std::uintptr_t address) const {
    const auto found = entered_.find(address);
    return found == entered_.end() ? clock_ : clock_ - found->second;
  }

 private:
  static constexpr std::size_t kBinStepBytes = 512;
  static constexpr std::size_t kBinCount = 4096;  // the last: 2 MiB
  static constexpr std::size_t kPageBins = 64;
  static constexpr std::size_t kPageCount = kBinCount / kPageBins;

  struct Bin {
    std::uintptr_t lowest = 0;                            // 0: the bin is empty
    ChunkedList<std::uintptr_t, PackedAddresses> others;  // all above `lowest`
  };
  using Page = std::array<Bin, kPageBins>;
  struct StreamSet {
    explicit StreamSet(StreamHandle s) : stream(s) {}
    StreamHandle stream;
    std::uint64_t used_pages = 0;              // bit i: used_bins[i] is not 0
    std::uint64_t used_bins[kPageCount] = {};  // bit j of i: bin 64 i + j is not empty
    std::unique_ptr<Page> pages[kPageCount];
    ChunkedList<Key> large;

    Bin& bin(std::size_t index) const noexcept { return (*pages[index / kPageBins])[index % kPageBins]; }
    bool is_used(std::size_t index) const noexcept { return (used_bins[index / kPageBins] >> (index % kPageBins) & 1) != 0; }
    // The first bin from `index` on that holds something, the last one before it; kBinCount: none.
    std::size_t used_from(std::size_t index) const noexcept;
    std::size_t used_before(std::size_t index) const noexcept;
    Key lowest_of(std::size_t index) const noexcept { return {bytes_of(index), bin(index).lowest}; }
    Key highest_of(std::size_t index) const noexcept;

    void insert(Key key);
    bool erase(Key key) noexcept;
    bool contains(Key key) const noexcept;
  };

  static bool has_bin(std::size_t bytes) noexcept { return bytes <= kBinCount * kBinStepBytes; }
  static std::size_t bin_of(std::size_t bytes) noexcept { return bytes / kBinStepBytes - 1; }
  static std::size_t bytes_of(std::size_t index) noexcept { return (index + 1) * kBinStepBytes; }
  StreamSet* find_stream(StreamHandle stream) const noexcept;
  StreamSet& make_stream(StreamHandle stream);

  std::vector<std::unique_ptr<StreamSet>> streams_;  // by stream
  std::size_t count_ = 0;
  std::int64_t clock_ = 0;
  std::unordered_map<std::uintptr_t, std::int64_t> entered_;  // by address: the clock then, where it was not 0
};

}  // namespace mybackend::caching
