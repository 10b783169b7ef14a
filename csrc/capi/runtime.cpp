#include "capi/runtime.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>

#include "base/machine.h"
#include "core/cpu_allocator.h"
#include "driver/cuda/cuda_driver.h"
#include "driver/sim/sim_driver.h"

namespace mybackend {
namespace {

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

void apply_host_settings(PinnedCache& pinned, const Settings& s) {
  const auto bound = [](std::size_t bytes) { return bytes == kUnlimitedBytes ? machine_memory_bytes() / 8 : bytes; };
  cpu_pool::set_max_cached_bytes(s.cpu_pool_max_cached_mb);
  cpu_allocator::large_cache().set_max_cached_bytes(bound(s.cpu_max_cached_mb));
  cpu_allocator::large_cache().set_decay_ns(s.cpu_decay_ms * 1'000'000);
  PinnedSettings p;
  p.round_threshold_bytes = s.pinned_max_round_threshold_mb;
  p.block_cached_bytes = s.pinned_max_cached_size_mb;
  p.total_cached_bytes = bound(s.pinned_max_cached_mb);
  p.reserve_segment_bytes = s.pinned_reserve_segment_size_mb;
  p.register_memory = s.pinned_use_cuda_host_register;
  p.register_threads = static_cast<int>(s.pinned_num_register_threads);
  p.background_thread = s.pinned_use_background_threads;
  p.ignore_unknown_frees = s.pinned_free_catch_all;
  pinned.apply_settings(p);
}

}  // namespace

Runtime::Runtime() {
  apply_host_settings(pinned_, config_.settings());
  config_.on_change([this](const Settings& changed) { apply_host_settings(pinned_, changed); });
}

Runtime& Runtime::get() {
  static Runtime* runtime = [] {
    pthread_atfork([] { get().prepare_fork(); }, [] { get().after_fork(false); }, [] { get().after_fork(true); });
    return new Runtime;
  }();
  return *runtime;
}

void Runtime::prepare_fork() {
  mutex_.lock();
  cpu_allocator::lock_for_fork();
  cpu_pool::lock_for_fork();
  tracker_detail::lock_for_fork();
  pinned_.lock_for_fork();
  DeviceMemory* const cuda = cuda_memory_if_started();
  cuda_forks_ = cuda == nullptr || cuda->lock_for_fork();
  driver_forks_ = memory_if_started() == cuda ? cuda_forks_ : memory_if_started() == nullptr || memory_if_started()->lock_for_fork();
}

void Runtime::after_fork(bool in_child) {
  DeviceMemory* const cuda = cuda_memory_if_started();
  if (DeviceMemory* memory = memory_if_started(); memory != nullptr && memory != cuda) memory->unlock_after_fork(in_child);
  if (cuda != nullptr) cuda->unlock_after_fork(in_child);
  pinned_.unlock_after_fork(in_child);
  tracker_detail::unlock_after_fork();
  cpu_pool::unlock_after_fork();
  cpu_allocator::unlock_after_fork();
  mutex_.unlock();
  if (in_child && !driver_forks_) bad_fork_.store(true);
  if (in_child && !cuda_forks_) cuda_bad_fork_.store(true);
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

Status Runtime::start_cuda_locked(bool hip) {
  if (cuda_memory_if_started() != nullptr) return {};
  std::unique_ptr<CudaDriver> driver;
  if (Status status = CudaDriver::create(hip ? cuda::Vendor::kHip : cuda::Vendor::kCuda, &driver); !status.ok()) return status;
  auto* memory = new DeviceMemory(std::move(driver), &config_);  // never destroyed, as the runtime
  memory->set_caching_enabled(!is_set("MYBACKEND_NO_MEMORY_CACHING") && !is_set("PYTORCH_NO_CUDA_MEMORY_CACHING"));
  cuda_memory_.store(memory, std::memory_order_release);
  return {};
}

Status Runtime::start_locked(const std::string& name) {
  if (name == "hip") {
    return {StatusCode::kNotSupported,
            "driver:hip: tensors of the device `mybackend` in an AMD GPU's memory are not supported; "
            "mybackend.cuda.pluggable_allocator() puts this allocator under torch.cuda"};
  }
  if (name == "cuda") {
    if (Status status = start_cuda_locked(false); !status.ok()) return {status.code(), "driver:cuda: " + status.message()};
    // One allocator for torch.cuda's tensors and ours: what a borrowed kernel makes is ours at once.
    pinned_.set_registrar(&cuda_memory_if_started()->driver());
    memory_.store(cuda_memory_if_started(), std::memory_order_release);
    return {};
  }
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
  memory_.store(memory, std::memory_order_release);
  return {};
}

Status Runtime::bad_fork_error() const {
  return {
      StatusCode::kFailed,
      "Cannot re-initialize mybackend in forked subprocess. To use mybackend with multiprocessing, you must use the 'spawn' start method"};
}

DeviceMemory* Runtime::cuda_memory(Status* error) {
  if (cuda_bad_fork_.load()) {
    *error = bad_fork_error();
    return nullptr;
  }
  if (DeviceMemory* memory = cuda_memory_if_started()) return memory;
  if (Status status = read_environment(); !status.ok()) {
    *error = status;
    return nullptr;
  }
  std::lock_guard lock(mutex_);
  *error = start_cuda_locked(config_.settings().driver == "hip");
  return cuda_memory_if_started();
}

void Runtime::set_auto_driver(std::function<std::string()> choose) {
  std::lock_guard lock(mutex_);
  choose_driver_ = std::move(choose);
}

std::string Runtime::driver_name(Status* error) {
  if (Status status = read_environment(); !status.ok()) {
    *error = status;
    return "";
  }
  std::string name = config_.settings().driver;
  if (name != "auto") return name;
  std::function<std::string()> choose;
  {
    std::lock_guard lock(mutex_);
    if (!auto_driver_.empty()) return auto_driver_;
    choose = choose_driver_;
  }
  if (choose == nullptr) return "sim";
  name = choose();  // under no lock: it may wait for Python's
  std::lock_guard lock(mutex_);
  if (auto_driver_.empty()) auto_driver_ = name;
  return auto_driver_;
}

DeviceMemory* Runtime::memory(Status* error) {
  if (is_in_bad_fork()) {
    *error = bad_fork_error();
    return nullptr;
  }
  if (DeviceMemory* memory = memory_if_started()) return memory;
  const std::string name = driver_name(error);
  if (name.empty()) return nullptr;
  std::lock_guard lock(mutex_);
  if (DeviceMemory* memory = memory_if_started()) return memory;
  *error = start_locked(name);
  return memory_if_started();
}

int Runtime::device_count() noexcept {
  if (DeviceMemory* memory = memory_if_started()) return memory->device_count();
  Status status;
  const std::string name = driver_name(&status);
  if (name == "cuda" || name == "hip") {
    DeviceMemory* memory = cuda_memory(&status);
    return memory != nullptr ? memory->device_count() : 0;
  }
  if (const char* text = std::getenv("MYBACKEND_DEVICE_COUNT"); text != nullptr && *text != '\0') {
    const int count = std::atoi(text);
    return count >= 1 && count <= 64 ? count : 1;  // memory() reports the bad value
  }
  return static_cast<int>(config_.settings().device_count);
}

}  // namespace mybackend
