// Memory for the allocator's own records: pieces of a few cache lines, taken from large chunks.
// With many live blocks each look at a record is a cache miss; in huge pages it is not a miss of the
// address translation too, and a piece that begins with a line has no part of another's.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace mybackend::caching {

class RecordArena {
 public:
  static constexpr std::size_t kLineBytes = 64;
  static constexpr std::size_t kMaxLines = 16;

  RecordArena() = default;
  RecordArena(const RecordArena&) = delete;
  RecordArena& operator=(const RecordArena&) = delete;

  // A piece of 1 to kMaxLines lines, aligned to one. Throws std::bad_alloc.
  void* allocate(std::size_t lines);
  // What `allocate` gave, and for how many lines. Once all pieces are back, the chunks go back to
  // the system, but for the first one.
  void deallocate(void* piece, std::size_t lines) noexcept;

 private:
  static constexpr std::size_t kFirstChunkBytes = std::size_t{16} << 10;  // they double, up to a huge page

  struct Piece {
    Piece* next;
  };
  struct Deleter {
    std::size_t bytes;
    void operator()(std::byte* chunk) const noexcept;
  };
  using Chunk = std::unique_ptr<std::byte, Deleter>;

  void add_chunk();
  void start(std::byte* chunk, std::size_t bytes) noexcept;

  std::vector<Chunk> chunks_;
  std::size_t last_chunk_bytes_ = 0;
  std::byte* unused_ = nullptr;  // of the last chunk: what was in no piece yet
  std::size_t unused_lines_ = 0;
  std::size_t live_pieces_ = 0;
  Piece* free_[kMaxLines + 1] = {};  // by lines
};

}  // namespace mybackend::caching
