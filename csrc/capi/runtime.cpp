#include "capi/runtime.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>

#include "core/cpu_pool.h"
#include "driver/sim/sim_driver.h"

namespace mybackend {
namespace {

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace

Runtime& Runtime::get() {
  static Runtime* runtime = new Runtime;
  return *runtime;
}

void Runtime::prepare_fork() {
  mutex_.lock();
  cpu_pool::lock_for_fork();
  tracker_detail::lock_for_fork();
  pinned_.lock_for_fork();
  driver_forks_ = memory_if_started() == nullptr || memory_if_started()->lock_for_fork();
}

void Runtime::after_fork(bool in_child) {
  if (DeviceMemory* memory = memory_if_started()) memory->unlock_after_fork(in_child);
  pinned_.unlock_after_fork();
  tracker_detail::unlock_after_fork();
  cpu_pool::unlock_after_fork();
  mutex_.unlock();
  if (in_child && !driver_forks_) bad_fork_.store(true);
}

Status Runtime::read_environment() {
  std::lock_guard lock(mutex_);
  if (environment_read_) return environment_status_;
  environment_read_ = true;
  if (const char* variable = config_variable_in_force()) {
    Status status = config_.set(std::getenv(variable), variable);
    if (!status.ok()) environment_status_ = {status.code(), std::string(variable) + ": " + status.message()};
  }
  return environment_status_;
}

Status Runtime::configure(std::string_view text, const std::string& origin) {
  (void)read_environment();
  if (Status status = config_.set(text, origin); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  environment_status_ = {};
  return {};
}

Status Runtime::start_locked() {
  const Settings settings = config_.settings();
  SimOptions options;
  options.device_count = static_cast<int>(settings.device_count);
  if (const char* text = std::getenv("MYBACKEND_DEVICE_COUNT"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long count = std::strtol(text, &end, 10);
    if (*end != '\0' || count < 1 || count > 64) {
      return {StatusCode::kInvalidArgument,
              std::string("MYBACKEND_DEVICE_COUNT: bad value '") + text + "'; expected a whole number from 1 to 64"};
    }
    options.device_count = static_cast<int>(count);
  }
  options.capacity_bytes = settings.device_memory_mb;
  std::unique_ptr<SimDriver> driver;
  if (Status status = SimDriver::create(options, &driver); !status.ok()) return status;
  auto* memory = new DeviceMemory(std::move(driver), &config_);  // never destroyed, as the runtime
  memory->set_caching_enabled(!is_set("MYBACKEND_NO_MEMORY_CACHING"));
  pthread_atfork([] { Runtime::get().prepare_fork(); }, [] { Runtime::get().after_fork(false); }, [] { Runtime::get().after_fork(true); });
  memory_.store(memory, std::memory_order_release);
  return {};
}

DeviceMemory* Runtime::memory(Status* error) {
  if (is_in_bad_fork()) {
    *error = {StatusCode::kFailed,
              "Cannot re-initialize mybackend in forked subprocess. To use mybackend with multiprocessing, you must use the 'spawn' start "
              "method"};
    return nullptr;
  }
  if (DeviceMemory* memory = memory_if_started()) return memory;
  if (Status status = read_environment(); !status.ok()) {
    *error = status;
    return nullptr;
  }
  std::lock_guard lock(mutex_);
  if (DeviceMemory* memory = memory_if_started()) return memory;
  *error = start_locked();
  return memory_if_started();
}

int Runtime::device_count() const noexcept {
  if (DeviceMemory* memory = memory_if_started()) return memory->device_count();
  if (const char* text = std::getenv("MYBACKEND_DEVICE_COUNT"); text != nullptr && *text != '\0') {
    const int count = std::atoi(text);
    return count >= 1 && count <= 64 ? count : 1;  // memory() reports the bad value
  }
  return static_cast<int>(config_.settings().device_count);
}

}  // namespace mybackend
