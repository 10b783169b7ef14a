#include "core/ipc_event.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

namespace mybackend {

// Both only grow, and may wrap.
struct IpcEvent::Page {
  static constexpr std::uint64_t kMagic = 0x6d79'6576'656e'7431;  // "myevent1"
  std::uint64_t magic;
  std::atomic<std::uint32_t> recorded;   // how often it was recorded
  std::atomic<std::uint32_t> completed;  // the newest record that is complete; futex
};

namespace {

constexpr std::size_t kBytes = 4096;

bool reached(std::uint32_t completed, std::uint32_t wanted) noexcept {
  return static_cast<std::int32_t>(completed - wanted) >= 0;
}

}  // namespace

Status IpcEvent::adopt(int descriptor, std::string handle, std::shared_ptr<IpcEvent>* out) {
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    ::close(descriptor);
    return {StatusCode::kFailed, std::string("event between processes: mmap: ") + std::strerror(error)};
  }
  out->reset(new IpcEvent(descriptor, static_cast<Page*>(memory), std::move(handle)));
  return {};
}

Status IpcEvent::create(std::shared_ptr<IpcEvent>* out) {
  const int descriptor = memfd_create("mybackend_event", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, kBytes) != 0) {
    const int error = errno;
    if (descriptor >= 0) ::close(descriptor);
    return {StatusCode::kFailed, std::string("event between processes: memfd_create: ") + std::strerror(error)};
  }
  if (Status status = adopt(descriptor, "mybackend_event:" + std::to_string(getpid()) + ":" + std::to_string(descriptor), out);
      !status.ok()) {
    return status;
  }
  (*out)->page_->magic = Page::kMagic;
  return {};
}

Status IpcEvent::open(const std::string& handle, std::shared_ptr<IpcEvent>* out) {
  long process = 0;
  int number = 0, end = 0;
  if (std::sscanf(handle.c_str(), "mybackend_event:%ld:%d%n", &process, &number, &end) != 2 ||
      static_cast<std::size_t>(end) != handle.size()) {
    return {StatusCode::kInvalidArgument, "not the handle of an event between processes"};
  }
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  struct stat info{};
  if (descriptor < 0) return {StatusCode::kInvalidArgument, "the event's maker, process " + std::to_string(process) + ", is gone"};
  if (fstat(descriptor, &info) != 0 || info.st_size != static_cast<off_t>(kBytes)) {
    ::close(descriptor);
    return {StatusCode::kInvalidArgument, "the event's maker has closed it"};
  }
  std::shared_ptr<IpcEvent> event;
  if (Status status = adopt(descriptor, handle, &event); !status.ok()) return status;
  if (event->page_->magic != Page::kMagic) return {StatusCode::kInvalidArgument, "the event's maker has closed it"};
  *out = std::move(event);
  return {};
}

IpcEvent::~IpcEvent() {
  munmap(page_, kBytes);
  ::close(descriptor_);
}

std::string IpcEvent::handle() const {
  return handle_;
}

Status IpcEvent::record(const std::shared_ptr<IpcEvent>& self, Driver* driver, int device, StreamHandle stream) {
  const std::uint32_t version = self->page_->recorded.fetch_add(1) + 1;
  return driver->stream_enqueue(device, stream, "ipc_event_record", [self, version] {
    // A later record may have been faster, on another stream.
    std::uint32_t now = self->page_->completed.load();
    while (!reached(now, version) && !self->page_->completed.compare_exchange_weak(now, version)) {
    }
    syscall(SYS_futex, &self->page_->completed, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  });
}

bool IpcEvent::query() const noexcept {
  return reached(page_->completed.load(), page_->recorded.load());
}

void IpcEvent::wait_for(std::uint32_t version) const noexcept {
  for (std::uint32_t now = page_->completed.load(); !reached(now, version); now = page_->completed.load()) {
    syscall(SYS_futex, &page_->completed, FUTEX_WAIT, now, nullptr, nullptr, 0);
  }
}

void IpcEvent::synchronize() const noexcept {
  wait_for(page_->recorded.load());
}

Status IpcEvent::wait(const std::shared_ptr<IpcEvent>& self, Driver* driver, int device, StreamHandle stream) {
  const std::uint32_t version = self->page_->recorded.load();
  if (reached(self->page_->completed.load(), version)) return {};
  return driver->stream_enqueue(device, stream, "ipc_event_wait", [self, version] { self->wait_for(version); });
}

}  // namespace mybackend
