// An event that other processes can query and wait for: a page of memory without a name, shared by
// its descriptor. The handle says where the descriptor is (process and number), so it can be opened
// while the maker lives, and nothing is left behind when a process is killed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "driver/driver.h"

namespace mybackend {

class IpcEvent {
 public:
  static Status create(std::shared_ptr<IpcEvent>* out);
  // kInvalidArgument for a text that is no handle, or whose maker is gone.
  static Status open(const std::string& handle, std::shared_ptr<IpcEvent>* out);
  ~IpcEvent();
  IpcEvent(const IpcEvent&) = delete;
  IpcEvent& operator=(const IpcEvent&) = delete;

  std::string handle() const;

  // The event is complete when the work that is queued on the stream now is done. Recording it
  // again starts it anew. `self` is kept until then.
  static Status record(const std::shared_ptr<IpcEvent>& self, Driver* driver, int device, StreamHandle stream);
  // Whether the last record is complete; an event that was never recorded is.
  bool query() const noexcept;
  void synchronize() const noexcept;
  // Later work of the stream starts when the event, as last recorded now, is complete.
  static Status wait(const std::shared_ptr<IpcEvent>& self, Driver* driver, int device, StreamHandle stream);

 private:
  struct Page;
  IpcEvent(int descriptor, Page* page, std::string handle) : descriptor_(descriptor), page_(page), handle_(std::move(handle)) {}
  static Status adopt(int descriptor, std::string handle, std::shared_ptr<IpcEvent>* out);
  void wait_for(std::uint32_t version) const noexcept;

  const int descriptor_;
  Page* const page_;
  const std::string handle_;
};

}  // namespace mybackend
