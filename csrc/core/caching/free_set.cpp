#include "core/caching/free_set.h"

#include <algorithm>

#include "core/caching/block.h"

namespace mybackend::caching {

FreeSet::Entry FreeSet::key_of(const Block* block) noexcept {
  return {block->bytes, block->address, const_cast<Block*>(block)};
}

const FreeSet::StreamList* FreeSet::find_stream(StreamHandle stream) const noexcept {
  for (const StreamList& list : streams_) {
    if (list.stream == stream) return &list;
  }
  return nullptr;
}

FreeSet::StreamList* FreeSet::find_stream(StreamHandle stream) noexcept {
  return const_cast<StreamList*>(static_cast<const FreeSet*>(this)->find_stream(stream));
}

FreeSet::Place FreeSet::find_place(const StreamList& list, const Entry& key) noexcept {
  std::size_t low = 0, high = list.chunks.size();
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (list.chunks[middle].last < key)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == list.chunks.size()) return {low, 0};
  const Chunk& chunk = *list.chunks[low].chunk;
  // Branch-free lower bound: the outcomes are unpredictable, and mispredicted branches would
  // cost more than the comparisons.
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

FreeSet::Key FreeSet::key(const Block* block) noexcept {
  return {block->bytes, block->address};
}

// The place of a member: the hint if it is right, else a search.
FreeSet::Place FreeSet::place_of(StreamList& list, const Entry& key) const noexcept {
  if (hint_.chunk < list.chunks.size()) {
    const Chunk& chunk = *list.chunks[hint_.chunk].chunk;
    if (hint_.index < chunk.count) {
      const Entry& entry = chunk.entries[hint_.index];
      if (entry.address == key.address && entry.bytes == key.bytes) return hint_;
    }
  }
  return find_place(list, key);
}

void FreeSet::insert(Block* block) {
  StreamList* list = find_stream(block->stream());
  if (list == nullptr) {
    auto position = std::lower_bound(streams_.begin(), streams_.end(), block->stream(),
                                     [](const StreamList& l, StreamHandle s) { return l.stream < s; });
    list = &*streams_.insert(position, StreamList{block->stream(), {}});
  }
  insert_at(*list, key_of(block));
  ++count_;
}

void FreeSet::insert_at(StreamList& list, const Entry& key) {
  if (list.chunks.empty()) {
    list.chunks.push_back({key, std::make_unique<Chunk>()});
    list.chunks.front().chunk->entries[0] = key;
    list.chunks.front().chunk->count = 1;
    return;
  }
  Place place = find_place(list, key);
  if (place.chunk == list.chunks.size()) {  // beyond the largest: append to the last chunk
    --place.chunk;
    place.index = list.chunks[place.chunk].chunk->count;
  }
  Chunk* chunk = list.chunks[place.chunk].chunk.get();
  if (chunk->count == kChunkCapacity) {
    auto upper = std::make_unique<Chunk>();
    constexpr std::size_t half = kChunkCapacity / 2;
    std::copy(chunk->entries + half, chunk->entries + kChunkCapacity, upper->entries);
    upper->count = kChunkCapacity - half;
    const Entry upper_last = upper->entries[upper->count - 1];
    list.chunks.insert(list.chunks.begin() + static_cast<std::ptrdiff_t>(place.chunk) + 1, ChunkRef{upper_last, std::move(upper)});
    chunk->count = half;
    list.chunks[place.chunk].last = chunk->entries[half - 1];
    if (place.index > half) {
      ++place.chunk;
      place.index -= half;
      chunk = list.chunks[place.chunk].chunk.get();
    }
  }
  std::copy_backward(chunk->entries + place.index, chunk->entries + chunk->count, chunk->entries + chunk->count + 1);
  chunk->entries[place.index] = key;
  ++chunk->count;
  list.chunks[place.chunk].last = chunk->entries[chunk->count - 1];
}

void FreeSet::erase_at(StreamList& list, const Place& place) noexcept {
  ChunkRef& ref = list.chunks[place.chunk];
  Chunk& chunk = *ref.chunk;
  std::copy(chunk.entries + place.index + 1, chunk.entries + chunk.count, chunk.entries + place.index);
  --chunk.count;
  if (chunk.count == 0) {
    list.chunks.erase(list.chunks.begin() + static_cast<std::ptrdiff_t>(place.chunk));
  } else {
    ref.last = chunk.entries[chunk.count - 1];
  }
}

bool FreeSet::erase(const Block* block) noexcept {
  StreamList* list = find_stream(block->stream());
  if (list == nullptr) return false;
  const Place place = place_of(*list, key_of(block));
  if (place.chunk == list->chunks.size() || list->chunks[place.chunk].chunk->entries[place.index].block != block) return false;
  erase_at(*list, place);
  --count_;
  return true;
}

void FreeSet::replace(Key member, Block* block) {
  StreamList& list = *find_stream(block->stream());
  const Place place = place_of(list, Entry{member.bytes, member.address, nullptr});
  ChunkRef& ref = list.chunks[place.chunk];
  Chunk& chunk = *ref.chunk;
  Entry* const entry = &chunk.entries[place.index];
  const Entry key = key_of(block);
  const bool after_previous = place.index > 0 ? entry[-1] < key : place.chunk == 0 || list.chunks[place.chunk - 1].last < key;
  const bool before_next = place.index + 1 < chunk.count
                               ? key < entry[1]
                               : place.chunk + 1 == list.chunks.size() || key < list.chunks[place.chunk + 1].chunk->entries[0];
  if (after_previous && before_next) {
    *entry = key;
    if (place.index + 1 == chunk.count) ref.last = key;
    return;
  }
  // Inside the chunk: shift what lies between the two places.
  if (!after_previous && (place.chunk == 0 || list.chunks[place.chunk - 1].last < key)) {
    Entry* target = entry;
    while (target > chunk.entries && key < target[-1]) {
      *target = target[-1];
      --target;
    }
    *target = key;
    ref.last = chunk.entries[chunk.count - 1];
    return;
  }
  if (!before_next && (place.chunk + 1 == list.chunks.size() || key < list.chunks[place.chunk + 1].chunk->entries[0])) {
    Entry* target = entry;
    const Entry* const last = chunk.entries + chunk.count - 1;
    while (target < last && target[1] < key) {
      *target = target[1];
      ++target;
    }
    *target = key;
    ref.last = *last;
    return;
  }
  erase_at(list, place);
  insert_at(list, key);
}

bool FreeSet::contains(const Block* block) const noexcept {
  const StreamList* list = find_stream(block->stream());
  if (list == nullptr) return false;
  const Place place = find_place(*list, key_of(block));
  return place.chunk < list->chunks.size() && list->chunks[place.chunk].chunk->entries[place.index].block == block;
}

Block* FreeSet::lower_bound(StreamHandle stream, std::size_t bytes) const noexcept {
  const StreamList* list = find_stream(stream);
  if (list == nullptr || list->chunks.empty()) return nullptr;
  const Place place = find_place(*list, Entry{bytes, 0, nullptr});
  if (place.chunk == list->chunks.size()) return nullptr;
  hint_ = place;
  return list->chunks[place.chunk].chunk->entries[place.index].block;
}

Block* FreeSet::below(StreamHandle stream, std::size_t bytes) const noexcept {
  const StreamList* list = find_stream(stream);
  if (list == nullptr || list->chunks.empty()) return nullptr;
  const Place place = find_place(*list, Entry{bytes, 0, nullptr});
  if (place.index > 0) return list->chunks[place.chunk].chunk->entries[place.index - 1].block;
  return place.chunk > 0 ? list->chunks[place.chunk - 1].last.block : nullptr;
}

Block* FreeSet::after(const Block* block) const noexcept {
  const StreamList* list = find_stream(block->stream());
  if (list == nullptr) return nullptr;
  const Place place = find_place(*list, key_of(block));
  const Chunk& chunk = *list->chunks[place.chunk].chunk;
  if (place.index + 1 < chunk.count) return chunk.entries[place.index + 1].block;
  return place.chunk + 1 < list->chunks.size() ? list->chunks[place.chunk + 1].chunk->entries[0].block : nullptr;
}

Block* FreeSet::before(const Block* block) const noexcept {
  const StreamList* list = find_stream(block->stream());
  if (list == nullptr) return nullptr;
  const Place place = find_place(*list, key_of(block));
  if (place.index > 0) return list->chunks[place.chunk].chunk->entries[place.index - 1].block;
  return place.chunk > 0 ? list->chunks[place.chunk - 1].last.block : nullptr;
}

std::vector<Block*> FreeSet::blocks() const {
  std::vector<Block*> result;
  result.reserve(count_);
  for (const StreamList& list : streams_) {
    for (const ChunkRef& ref : list.chunks) {
      for (std::size_t i = 0; i < ref.chunk->count; ++i) result.push_back(ref.chunk->entries[i].block);
    }
  }
  return result;
}

}  // namespace mybackend::caching
