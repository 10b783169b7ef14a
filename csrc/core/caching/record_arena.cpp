#include "core/caching/record_arena.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/huge_pages.h"

namespace mybackend::caching {

void RecordArena::Deleter::operator()(std::byte* chunk) const noexcept {
  if (bytes == kHugePageBytes)
    munmap(chunk, bytes);
  else
    ::operator delete(chunk, std::align_val_t{kLineBytes});
}

void* RecordArena::allocate(std::size_t lines) {
  if (Piece* piece = free_[lines]; piece != nullptr) {
    free_[lines] = piece->next;
    ++live_pieces_;
    return piece;
  }
  if (unused_lines_ < lines) add_chunk();
  void* piece = unused_;
  unused_ += lines * kLineBytes;
  unused_lines_ -= lines;
  ++live_pieces_;
  return piece;
}

void RecordArena::deallocate(void* piece, std::size_t lines) noexcept {
  free_[lines] = new (piece) Piece{free_[lines]};
  if (--live_pieces_ > 0 || chunks_.size() == 1) return;
  chunks_.erase(chunks_.begin() + 1, chunks_.end());
  std::fill(std::begin(free_), std::end(free_), nullptr);
  last_chunk_bytes_ = kFirstChunkBytes;
  start(chunks_.front().get(), kFirstChunkBytes);
}

void RecordArena::start(std::byte* chunk, std::size_t bytes) noexcept {
  unused_ = chunk;
  unused_lines_ = bytes / kLineBytes;
}

void RecordArena::add_chunk() {
  const std::size_t bytes = chunks_.empty() ? kFirstChunkBytes : std::min(2 * last_chunk_bytes_, kHugePageBytes);
  chunks_.reserve(chunks_.size() + 1 > chunks_.capacity() ? 2 * chunks_.size() + 1 : 0);
  void* memory = bytes == kHugePageBytes ? map_huge_pages(bytes) : ::operator new(bytes, std::align_val_t{kLineBytes});
  if (memory == nullptr) throw std::bad_alloc();
  Chunk chunk(static_cast<std::byte*>(memory), Deleter{bytes});
  while (unused_lines_ > 0) {
    const std::size_t lines = std::min(unused_lines_, kMaxLines);
    free_[lines] = new (unused_) Piece{free_[lines]};
    unused_ += lines * kLineBytes;
    unused_lines_ -= lines;
  }
  last_chunk_bytes_ = bytes;
  start(chunk.get(), bytes);
  chunks_.push_back(std::move(chunk));
}

}  // namespace mybackend::caching
