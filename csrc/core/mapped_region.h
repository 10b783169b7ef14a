// Mapped memory: a part of a file, an unnamed temporary file in a folder, or anonymous memory that
// other processes can share.
//
// Sizes are checked, and the space of a growing file is reserved, before anything is mapped: a
// short file or a full disk is an error here and not a fault on first touch. What failed left
// nothing behind: no descriptor, no mapping, no file, no changed size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/status.h"

namespace mybackend {

enum class MapAccess : unsigned char {
  kPrivate,   // writable; what is written stays in this process (copy on write)
  kShared,    // writable; what is written is in the file, and seen by others that map it
  kReadOnly,  // a write is a fault
};

enum class MapAdvice : unsigned char { kNormal, kRandom, kSequential, kWillNeed, kHugePages };

// For the pages of [data, data + bytes), which lie in one mapping.
Status advise_pages(const void* data, std::size_t bytes, MapAdvice advice) noexcept;
// Of these pages, bytes that are in memory.
std::size_t resident_bytes(const void* data, std::size_t bytes);

class MappedRegion {
 public:
  // Bytes [offset, offset + bytes) of a regular file; the offset need not be page aligned. With
  // kShared a file that is missing is made (mode 0600), and one that is too short grows.
  // kInvalidArgument: not a regular file, missing, unreadable, too short, a size that overflows.
  // kOutOfMemory: no space on the disk, no address space.
  static Status map_file(const std::string& path, MapAccess access, std::size_t offset, std::size_t bytes,
                         std::unique_ptr<MappedRegion>* out);
  // A file in `folder` without a name: it ends with the mapping, also when the process is killed.
  // Its space is reserved.
  static Status map_temporary(const std::string& folder, std::size_t bytes, std::unique_ptr<MappedRegion>* out);
  // Anonymous memory that is shared with processes forked later.
  static Status map_anonymous(std::size_t bytes, std::unique_ptr<MappedRegion>* out);

  ~MappedRegion();
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;

  void* data() const noexcept { return static_cast<char*>(mapping_) + skipped_bytes_; }
  std::size_t bytes() const noexcept { return bytes_; }
  MapAccess access() const noexcept { return access_; }
  const std::string& path() const noexcept { return path_; }  // empty when there is none

  // Writes changes of a shared mapping to the file before it returns.
  Status sync() noexcept;

 private:
  MappedRegion(void* mapping, std::size_t mapping_bytes, std::size_t skipped_bytes, std::size_t bytes, MapAccess access, std::string path)
      : mapping_(mapping),
        mapping_bytes_(mapping_bytes),
        skipped_bytes_(skipped_bytes),
        bytes_(bytes),
        access_(access),
        path_(std::move(path)) {}
  static Status map_descriptor(int descriptor, MapAccess access, std::size_t offset, std::size_t bytes, std::string path,
                               std::unique_ptr<MappedRegion>* out);

  void* const mapping_;
  const std::size_t mapping_bytes_;
  const std::size_t skipped_bytes_;  // between the mapping's page and data()
  const std::size_t bytes_;
  const MapAccess access_;
  const std::string path_;
};

}  // namespace mybackend
