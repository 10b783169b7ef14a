// The process's one set of allocators: the configuration, and, from first use on, the driver
// that it names with its devices. Everything above `core` reaches memory through here.
#pragma once

#include <functional>
#include <string>

#include "core/config.h"
#include "core/device_memory.h"
#include "core/pinned_cache.h"

namespace mybackend {

class Runtime {
 public:
  // Never destroyed: tensors may be freed by other libraries' exit handlers.
  static Runtime& get();

  Config& config() noexcept { return config_; }
  PinnedCache& pinned() noexcept { return pinned_; }

  // Reads the configuration variable in force, once. A bad value is remembered and returned by
  // every later call, and by memory(), until configure() was given a good one.
  Status read_environment();

  // Config::set, which also takes back the error of a bad variable.
  Status configure(std::string_view text, const std::string& origin);

  // The devices, made on first use. Null and *error when there are none: a bad configuration
  // variable, a driver that cannot start.
  DeviceMemory* memory(Status* error);
  // The same, or null when nothing was used yet. Does not start anything.
  DeviceMemory* memory_if_started() const noexcept { return memory_.load(std::memory_order_acquire); }

  // GPUs for the allocators that stand in for torch.cuda's: started by their first use, whatever
  // `driver` says (hip: AMD's). With driver:cuda memory() is the same.
  DeviceMemory* cuda_memory(Status* error);
  DeviceMemory* cuda_memory_if_started() const noexcept { return cuda_memory_.load(std::memory_order_acquire); }

  // Whether this is a forked child of a process whose driver cannot survive a fork. memory()
  // then fails.
  bool is_in_bad_fork() const noexcept { return bad_fork_.load(); }
  void prepare_fork();
  void after_fork(bool in_child);

  // The driver of the devices: what the configuration says, and for `auto` what the function given
  // here says when it is first asked for (sim when none was given). Empty and *error where the
  // configuration variable is bad.
  std::string driver_name(Status* error);
  void set_auto_driver(std::function<std::string()> choose);

  // Devices that memory() gives or would give; 0 where the driver cannot start. Starts nothing but,
  // for a GPU, the driver library.
  int device_count() noexcept;

 private:
  Runtime();
  Status start_locked(const std::string& driver);
  Status start_cuda_locked(bool hip);
  Status bad_fork_error() const;

  Config config_;
  PinnedCache pinned_;
  mutable std::mutex mutex_;
  bool environment_read_ = false;
  Status environment_status_;
  std::function<std::string()> choose_driver_;
  std::string auto_driver_;  // what it said
  std::atomic<DeviceMemory*> memory_{nullptr};
  std::atomic<DeviceMemory*> cuda_memory_{nullptr};
  std::atomic<bool> bad_fork_{false};
  std::atomic<bool> cuda_bad_fork_{false};
  bool driver_forks_ = true, cuda_forks_ = true;  // what the drivers said in prepare_fork
};

}  // namespace mybackend
