// A sorted list in chunks: a binary search finds the chunk, another one the place in it. Entries
// are copied into the chunks, so that a search touches a few adjacent cache lines; insertion and
// removal move at most one chunk's entries.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace mybackend::caching {

// Entry: copyable, with <. No two entries are equal.
template <class Entry>
class ChunkedList {
 public:
  // Where an entry is; valid until the list changes.
  struct Place {
    std::size_t chunk = 0;
    std::size_t index = 0;
  };

  bool empty() const noexcept { return refs_.empty(); }
  bool is_end(Place place) const noexcept { return place.chunk >= refs_.size(); }
  const Entry& at(Place place) const noexcept { return refs_[place.chunk].chunk->entries[place.index]; }
  const Entry& front() const noexcept { return refs_.front().chunk->entries[0]; }
  const Entry& back() const noexcept { return refs_.back().last; }

  // The first entry that is not less than the key.
  Place lower_bound(const Entry& key) const noexcept {
    std::size_t low = 0, high = refs_.size();
    while (low < high) {
      const std::size_t middle = (low + high) / 2;
      if (refs_[middle].last < key)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == refs_.size()) return {low, 0};
    const Chunk& chunk = *refs_[low].chunk;
    if (refs_.size() > kCachedChunks) {
      // Probably not in the cache: ask for all of it at once, instead of line after line.
      for (std::size_t i = 0; i < sizeof(Chunk); i += 64) __builtin_prefetch(reinterpret_cast<const char*>(&chunk) + i);
    }
    // Branch-free: the outcomes are unpredictable, and mispredicted branches would cost more than
    // the comparisons.
    const Entry* base = chunk.entries;
    std::size_t length = chunk.count;
    while (length > 1) {
      const std::size_t half = length / 2;
      base = base[half - 1] < key ? base + half : base;
      length -= half;
    }
    if (*base < key) ++base;
    return {low, static_cast<std::size_t>(base - chunk.entries)};
  }

  Place after(Place place) const noexcept {
    return place.index + 1 < refs_[place.chunk].chunk->count ? Place{place.chunk, place.index + 1} : Place{place.chunk + 1, 0};
  }
  // The end for the first entry.
  Place before(Place place) const noexcept {
    if (place.index > 0) return {place.chunk, place.index - 1};
    if (place.chunk == 0) return {refs_.size(), 0};
    return {place.chunk - 1, refs_[place.chunk - 1].chunk->count - 1};
  }

  template <class Function>
  void for_each(Function function) const {
    for (const Ref& ref : refs_) {
      for (std::size_t i = 0; i < ref.chunk->count; ++i) function(ref.chunk->entries[i]);
    }
  }

  void insert(const Entry& entry) {
    if (refs_.empty()) {
      refs_.push_back({entry, spare_ != nullptr ? std::move(spare_) : std::make_unique<Chunk>()});
      refs_.front().chunk->entries[0] = entry;
      refs_.front().chunk->count = 1;
      return;
    }
    Place place = lower_bound(entry);
    if (is_end(place)) {  // beyond the largest: append to the last chunk
      --place.chunk;
      place.index = refs_[place.chunk].chunk->count;
    }
    if (refs_[place.chunk].chunk->count == kCapacity) place = divide(place);
    Chunk& chunk = *refs_[place.chunk].chunk;
    std::copy_backward(chunk.entries + place.index, chunk.entries + chunk.count, chunk.entries + chunk.count + 1);
    chunk.entries[place.index] = entry;
    ++chunk.count;
    refs_[place.chunk].last = chunk.entries[chunk.count - 1];
  }

  void erase(Place place) noexcept {
    Ref& ref = refs_[place.chunk];
    Chunk& chunk = *ref.chunk;
    std::copy(chunk.entries + place.index + 1, chunk.entries + chunk.count, chunk.entries + place.index);
    if (--chunk.count > 0) {
      ref.last = chunk.entries[chunk.count - 1];
      return;
    }
    spare_ = std::move(ref.chunk);
    refs_.erase(refs_.begin() + static_cast<std::ptrdiff_t>(place.chunk));
  }

  // The entry at `place` becomes `entry`, and moves to where that belongs.
  void replace(Place place, const Entry& entry) {
    Ref& ref = refs_[place.chunk];
    Chunk& chunk = *ref.chunk;
    const bool above_chunk_before = place.chunk == 0 || refs_[place.chunk - 1].last < entry;
    const bool below_chunk_behind = place.chunk + 1 == refs_.size() || entry < refs_[place.chunk + 1].chunk->entries[0];
    if (!above_chunk_before || !below_chunk_behind) {
      erase(place);
      insert(entry);
      return;
    }
    // It stays in the chunk, often at its place: shift what lies between.
    Entry* target = chunk.entries + place.index;
    for (; target > chunk.entries && entry < target[-1]; --target) *target = target[-1];
    for (const Entry* last = chunk.entries + chunk.count - 1; target < last && target[1] < entry; ++target) *target = target[1];
    *target = entry;
    ref.last = chunk.entries[chunk.count - 1];
  }

 private:
  static constexpr std::size_t kCapacity = 512 / sizeof(Entry);
  static constexpr std::size_t kCachedChunks = 32;

  struct Chunk {
    std::size_t count = 0;
    Entry entries[kCapacity];
  };
  struct Ref {
    Entry last;  // copy of the chunk's largest entry
    std::unique_ptr<Chunk> chunk;
  };

  // Makes room in a full chunk: its upper half becomes a chunk of its own. Where `place` is then.
  Place divide(Place place) {
    Chunk& chunk = *refs_[place.chunk].chunk;
    auto upper = spare_ != nullptr ? std::move(spare_) : std::make_unique<Chunk>();
    constexpr std::size_t half = kCapacity / 2;
    std::copy(chunk.entries + half, chunk.entries + kCapacity, upper->entries);
    upper->count = kCapacity - half;
    const Entry upper_last = upper->entries[upper->count - 1];
    refs_.insert(refs_.begin() + static_cast<std::ptrdiff_t>(place.chunk) + 1, Ref{upper_last, std::move(upper)});
    chunk.count = half;
    refs_[place.chunk].last = chunk.entries[half - 1];
    return place.index > half ? Place{place.chunk + 1, place.index - half} : place;
  }

  std::vector<Ref> refs_;  // never holds an empty chunk
  std::unique_ptr<Chunk> spare_;
};

}  // namespace mybackend::caching
