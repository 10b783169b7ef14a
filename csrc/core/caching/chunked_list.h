// A sorted list in chunks: a search finds the chunk by the copies of the largest entries, then the
// place in it. Entries are copied into the chunks, so that a search touches a few adjacent cache lines;
// insertion and removal move at most one chunk's entries.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

namespace mybackend::caching {

// How a list stores its entries: as they are.
template <class Entry>
struct Whole {
  using Stored = Entry;
  static constexpr std::size_t kChunkEntries = 32;
  static constexpr Stored kUnused = {};
  static Stored pack(const Entry& entry) noexcept { return entry; }
  static const Entry& unpack(const Stored& stored, const Entry& /*of_chunk*/) noexcept { return stored; }
  static bool share_chunk(const Entry& /*a*/, const Entry& /*b*/) noexcept { return true; }
  // How many of the sorted entries are below the key.
  static std::size_t below(const Stored* entries, std::size_t count, const Stored& key) noexcept {
    const Stored* base = entries;
    while (count > 1) {
      const std::size_t half = count / 2;
      base = base[half - 1] < key ? base + half : base;
      count -= half;
    }
    return static_cast<std::size_t>(base - entries) + (*base < key ? 1 : 0);
  }
};

// Addresses that are multiples of 512, in 4 bytes each: those of one chunk are in the same 2 TiB.
struct PackedAddresses {
  using Stored = std::uint32_t;
  static constexpr std::size_t kChunkEntries = 32;
  static constexpr Stored kUnused = std::numeric_limits<Stored>::max();
  static constexpr int kGranuleShift = 9;
  static constexpr int kWindowShift = kGranuleShift + 32;
  static Stored pack(std::uintptr_t address) noexcept { return static_cast<Stored>(address >> kGranuleShift); }
  static std::uintptr_t unpack(Stored stored, std::uintptr_t of_chunk) noexcept {
    return (of_chunk >> kWindowShift << kWindowShift) | std::uintptr_t{stored} << kGranuleShift;
  }
  static bool share_chunk(std::uintptr_t a, std::uintptr_t b) noexcept { return (a ^ b) >> kWindowShift == 0; }
  // All of the chunk is counted, what is unused too (it is below nothing): the outcomes of a binary
  // search are unpredictable, and each mispredicted one costs more than this.
  static std::size_t below(const Stored* entries, std::size_t /*count*/, Stored key) noexcept {
    using Four [[gnu::vector_size(16)]] = Stored;
    Four below = {};
    for (std::size_t i = 0; i < kChunkEntries; i += 4) {
      Four some;
      std::memcpy(&some, entries + i, sizeof some);
      below -= reinterpret_cast<Four>(some < key);  // true is all ones: -1
    }
    return below[0] + below[1] + below[2] + below[3];
  }
};

// Entry: copyable, with <. No two entries are equal.
template <class Entry, class Storage = Whole<Entry>>
class ChunkedList {
  using Stored = typename Storage::Stored;

 public:
  // Where an entry is; valid until the list changes.
  struct Place {
    std::size_t chunk = 0;
    std::size_t index = 0;
  };

  bool empty() const noexcept { return refs_.empty(); }
  bool is_end(Place place) const noexcept { return place.chunk >= refs_.size(); }
  Entry at(Place place) const noexcept { return unpack(refs_[place.chunk], place.index); }
  Entry front() const noexcept { return unpack(refs_.front(), 0); }
  const Entry& back() const noexcept { return refs_.back().last; }

  // The first entry that is not less than the key.
  Place lower_bound(const Entry& key) const noexcept {
    const std::size_t chunk = chunk_for(key);
    if (chunk == refs_.size()) return {chunk, 0};
    const Ref& ref = refs_[chunk];
    if (!Storage::share_chunk(ref.last, key)) return {chunk, 0};
    return {chunk, Storage::below(ref.chunk->entries, ref.count, Storage::pack(key))};
  }

  Place after(Place place) const noexcept {
    return place.index + 1 < refs_[place.chunk].count ? Place{place.chunk, place.index + 1} : Place{place.chunk + 1, 0};
  }
  // The end for the first entry.
  Place before(Place place) const noexcept {
    if (place.index > 0) return {place.chunk, place.index - 1};
    if (place.chunk == 0) return {refs_.size(), 0};
    return {place.chunk - 1, refs_[place.chunk - 1].count - 1};
  }

  template <class Function>
  void for_each(Function function) const {
    for (const Ref& ref : refs_) {
      for (std::size_t i = 0; i < ref.count; ++i) function(unpack(ref, i));
    }
  }

  void insert(const Entry& entry) {
    Place place = lower_bound(entry);
    const auto can_hold = [&](std::size_t chunk) { return chunk < refs_.size() && Storage::share_chunk(refs_[chunk].last, entry); };
    if (!can_hold(place.chunk)) {
      if (place.chunk == 0 || !can_hold(place.chunk - 1)) {
        refs_.insert(refs_.begin() + static_cast<std::ptrdiff_t>(place.chunk), Ref{entry, 1, new_chunk()});
        refs_[place.chunk].chunk->entries[0] = Storage::pack(entry);
        return;
      }
      --place.chunk;  // behind its last
      place.index = refs_[place.chunk].count;
    }
    if (refs_[place.chunk].count == kCapacity) place = divide(place);
    Ref& ref = refs_[place.chunk];
    Stored* const to = ref.chunk->entries + place.index;
    std::copy_backward(to, ref.chunk->entries + ref.count, ref.chunk->entries + ref.count + 1);
    *to = Storage::pack(entry);
    if (place.index == ref.count++) ref.last = entry;
  }

  void erase(Place place) noexcept {
    Ref& ref = refs_[place.chunk];
    Stored* const entries = ref.chunk->entries;
    std::copy(entries + place.index + 1, entries + ref.count, entries + place.index);
    entries[--ref.count] = Storage::kUnused;
    if (ref.count > 0) {
      if (place.index == ref.count) ref.last = unpack(ref, ref.count - 1);
      return;
    }
    spare_ = std::move(ref.chunk);
    refs_.erase(refs_.begin() + static_cast<std::ptrdiff_t>(place.chunk));
  }

  // The entry at `place` becomes `entry`, and moves to where that belongs.
  void replace(Place place, const Entry& entry) {
    Ref& ref = refs_[place.chunk];
    Stored* const entries = ref.chunk->entries;
    const bool above_chunk_before = place.chunk == 0 || refs_[place.chunk - 1].last < entry;
    const bool below_chunk_behind = place.chunk + 1 == refs_.size() || entry < unpack(refs_[place.chunk + 1], 0);
    if (!above_chunk_before || !below_chunk_behind || !Storage::share_chunk(ref.last, entry)) {
      erase(place);
      insert(entry);
      return;
    }
    // It stays in the chunk, often at its place: shift what lies between.
    const Stored stored = Storage::pack(entry);
    Stored* target = entries + place.index;
    for (; target > entries && stored < target[-1]; --target) *target = target[-1];
    for (const Stored* last = entries + ref.count - 1; target < last && target[1] < stored; ++target) *target = target[1];
    *target = stored;
    const Entry last = unpack(ref, ref.count - 1);
    ref.last = last;
  }

 private:
  static constexpr std::size_t kCapacity = Storage::kChunkEntries;
  static constexpr std::size_t kCountedRefs = 16;

  struct alignas(64) Chunk {  // it begins with a cache line
    Chunk() { std::fill_n(entries, kCapacity, Storage::kUnused); }
    Stored entries[kCapacity];
  };
  struct Ref {
    Entry last;  // copy of the chunk's largest entry
    std::size_t count;
    std::unique_ptr<Chunk> chunk;
  };

  static decltype(auto) unpack(const Ref& ref, std::size_t index) noexcept { return Storage::unpack(ref.chunk->entries[index], ref.last); }
  std::unique_ptr<Chunk> new_chunk() { return spare_ != nullptr ? std::move(spare_) : std::make_unique<Chunk>(); }

  // The first chunk whose last entry is not less than the key.
  std::size_t chunk_for(const Entry& key) const noexcept {
    std::size_t low = 0, count = refs_.size();
    while (count > kCountedRefs) {
      const std::size_t half = count / 2;
      if (refs_[low + half - 1].last < key) low += half;
      count -= half;
    }
    std::size_t below = 0;  // counted, as PackedAddresses::below
    for (std::size_t i = low; i < low + count; ++i) below += refs_[i].last < key ? 1 : 0;
    return low + below;
  }

  // Makes room in a full chunk: its upper half becomes a chunk of its own. Where `place` is then.
  Place divide(Place place) {
    constexpr std::size_t half = kCapacity / 2;
    auto upper = new_chunk();
    Stored* const entries = refs_[place.chunk].chunk->entries;
    std::copy(entries + half, entries + kCapacity, upper->entries);
    const Entry upper_last = refs_[place.chunk].last;
    refs_.insert(refs_.begin() + static_cast<std::ptrdiff_t>(place.chunk) + 1, Ref{upper_last, kCapacity - half, std::move(upper)});
    std::fill(entries + half, entries + kCapacity, Storage::kUnused);
    Ref& lower = refs_[place.chunk];
    lower.count = half;
    lower.last = Entry(unpack(lower, half - 1));
    return place.index > half ? Place{place.chunk + 1, place.index - half} : place;
  }

  std::vector<Ref> refs_;
  std::unique_ptr<Chunk> spare_;
};

}  // namespace mybackend::caching
