#include "core/mapped_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/units.h"

namespace mybackend {
namespace {

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

Status system_error(const std::string& what, int error) {
  const bool no_room = error == ENOSPC || error == EDQUOT || error == ENOMEM || error == EFBIG;
  return {no_room ? StatusCode::kOutOfMemory : StatusCode::kInvalidArgument, what + ": " + std::strerror(error)};
}

struct Descriptor {
  explicit Descriptor(int fd) : fd(fd) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  const int fd;
};

// Reserves the space up to `bytes`. EOPNOTSUPP (some file systems) falls back to a size alone.
int reserve(int descriptor, std::size_t bytes) {
  const int error = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  if (error != EOPNOTSUPP && error != EINVAL) return error;
  return ftruncate(descriptor, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}

struct Pages {
  Pages(const void* data, std::size_t bytes)
      : begin(reinterpret_cast<std::uintptr_t>(data) / page_bytes() * page_bytes()),
        bytes(round_up(reinterpret_cast<std::uintptr_t>(data) + bytes, page_bytes()) - begin) {}
  void* data() const noexcept { return reinterpret_cast<void*>(begin); }
  const std::uintptr_t begin;
  const std::size_t bytes;
};

}  // namespace

Status advise_pages(const void* data, std::size_t bytes, MapAdvice advice) noexcept {
  const Pages pages(data, bytes);
  int value = MADV_NORMAL;
  switch (advice) {
    case MapAdvice::kNormal: break;
    case MapAdvice::kRandom: value = MADV_RANDOM; break;
    case MapAdvice::kSequential: value = MADV_SEQUENTIAL; break;
    case MapAdvice::kWillNeed: value = MADV_WILLNEED; break;
    case MapAdvice::kHugePages: value = MADV_HUGEPAGE; break;
  }
  return madvise(pages.data(), pages.bytes, value) == 0 ? Status() : system_error("madvise", errno);
}

std::size_t resident_bytes(const void* data, std::size_t bytes) {
  const Pages pages(data, bytes);
  std::vector<unsigned char> resident(pages.bytes / page_bytes());
  if (mincore(pages.data(), pages.bytes, resident.data()) != 0) return 0;
  std::size_t count = 0;
  for (unsigned char page : resident) count += page & 1;
  return count * page_bytes();
}

Status MappedRegion::map_descriptor(int descriptor, MapAccess access, std::size_t offset, std::size_t bytes, std::string path,
                                    std::unique_ptr<MappedRegion>* out) {
  const std::size_t skipped = offset % page_bytes();
  const int protection = access == MapAccess::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  // No reservation: a private mapping may be larger than memory, since most of it is only read.
  const int flags = access == MapAccess::kShared ? MAP_SHARED : MAP_PRIVATE | MAP_NORESERVE;
  void* mapping = mmap(nullptr, bytes + skipped, protection, flags, descriptor, static_cast<off_t>(offset - skipped));
  if (mapping == MAP_FAILED) return system_error("cannot map " + std::to_string(bytes) + " bytes of '" + path + "'", errno);
  out->reset(new MappedRegion(mapping, bytes + skipped, skipped, bytes, access, std::move(path)));
  return {};
}

Status MappedRegion::map_file(const std::string& path, MapAccess access, std::size_t offset, std::size_t bytes,
                              std::unique_ptr<MappedRegion>* out) {
  const std::string name = "'" + path + "'";
  if (bytes == 0) return {StatusCode::kInvalidArgument, name + ": cannot map 0 bytes"};
  constexpr std::size_t kMaxFileBytes = static_cast<std::size_t>(INT64_MAX) - (std::size_t{1} << 20);
  if (bytes > kMaxFileBytes || offset > kMaxFileBytes - bytes) {
    return {StatusCode::kInvalidArgument, name + ": " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + " overflow"};
  }
  // Looked at before it is opened: opening a FIFO would wait for its other end.
  struct stat info{};
  bool exists = ::stat(path.c_str(), &info) == 0;
  if (!exists && (errno != ENOENT || access != MapAccess::kShared)) return system_error("cannot open " + name, errno);
  if (exists && !S_ISREG(info.st_mode)) return {StatusCode::kInvalidArgument, name + " is not a regular file"};
  int flags = O_CLOEXEC | (access == MapAccess::kShared ? O_RDWR : O_RDONLY);
  if (!exists) flags |= O_CREAT | O_EXCL;
  int descriptor = ::open(path.c_str(), flags, 0600);
  if (descriptor < 0 && errno == EEXIST) {  // somebody made it in between
    exists = true;
    descriptor = ::open(path.c_str(), O_CLOEXEC | O_RDWR | O_NONBLOCK);
  }
  const Descriptor file(descriptor);
  if (file.fd < 0) return system_error("cannot open " + name, errno);
  if (::fstat(file.fd, &info) != 0) return system_error("cannot look at " + name, errno);
  if (!S_ISREG(info.st_mode)) return {StatusCode::kInvalidArgument, name + " is not a regular file"};
  const auto old_bytes = static_cast<std::size_t>(info.st_size);
  const bool grows = old_bytes < offset + bytes;
  if (grows && access != MapAccess::kShared) {
    return {StatusCode::kInvalidArgument, name + " has " + std::to_string(old_bytes) + " bytes; " + std::to_string(bytes) + " at offset " +
                                              std::to_string(offset) + " do not lie in it"};
  }
  Status status;
  if (grows) {
    if (const int error = reserve(file.fd, offset + bytes); error != 0) {
      status = system_error("cannot grow " + name + " to " + std::to_string(offset + bytes) + " bytes", error);
    }
  }
  if (status.ok()) status = map_descriptor(file.fd, access, offset, bytes, path, out);
  if (!status.ok()) {
    if (!exists)
      (void)::unlink(path.c_str());
    else if (grows && ::ftruncate(file.fd, static_cast<off_t>(old_bytes)) != 0)
      status = {status.code(), status.message() + " (and its size could not be restored)"};
  }
  return status;
}

Status MappedRegion::map_temporary(const std::string& folder, std::size_t bytes, std::unique_ptr<MappedRegion>* out) {
  const std::string name = "'" + folder + "'";
  int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT || errno == EINVAL)) {
    // A file system without unnamed files: a name nobody guesses, removed at once.
    std::string path = folder + "/mybackend-XXXXXX";
    fd = ::mkostemp(path.data(), O_CLOEXEC);
    if (fd >= 0) (void)::unlink(path.c_str());
  }
  const Descriptor file(fd);
  if (file.fd < 0) return system_error("cannot make a file in " + name, errno);
  if (const int error = reserve(file.fd, bytes); error != 0) {
    return system_error("cannot reserve " + std::to_string(bytes) + " bytes in " + name, error);
  }
  return map_descriptor(file.fd, MapAccess::kShared, 0, bytes, "", out);
}

Status MappedRegion::map_anonymous(std::size_t bytes, std::unique_ptr<MappedRegion>* out) {
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return system_error("cannot map " + std::to_string(bytes) + " bytes of shared memory", errno);
  out->reset(new MappedRegion(mapping, bytes, 0, bytes, MapAccess::kShared, ""));
  return {};
}

MappedRegion::~MappedRegion() {
  munmap(mapping_, mapping_bytes_);
}

Status MappedRegion::sync() noexcept {
  if (access_ != MapAccess::kShared) return {};
  return msync(mapping_, mapping_bytes_, MS_SYNC) == 0 ? Status() : system_error("msync", errno);
}

}  // namespace mybackend
