// Errors as values. `core` and the drivers return a Status; only the glue (torch, python,
// and the C++ convenience functions that say so) turns one into an exception.
#pragma once

#include <string>
#include <utility>

namespace mybackend {

enum class StatusCode {
  kOk,
  kOutOfMemory,      // the device, the host or a limit has no room for the request
  kInvalidArgument,  // the caller broke a precondition: a bad size, pointer, index, key
  kNotReady,         // a query found work still queued; not a failure
  kNotSupported,     // this driver or build cannot do it
  kFailed,           // the system refused; the message holds the call and its error
};

const char* status_code_name(StatusCode code) noexcept;

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const noexcept { return code_ == StatusCode::kOk; }
  StatusCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline const char* status_code_name(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk: return "ok";
    case StatusCode::kOutOfMemory: return "out of memory";
    case StatusCode::kInvalidArgument: return "invalid argument";
    case StatusCode::kNotReady: return "not ready";
    case StatusCode::kNotSupported: return "not supported";
    case StatusCode::kFailed: return "failed";
  }
  return "unknown";
}

}  // namespace mybackend
