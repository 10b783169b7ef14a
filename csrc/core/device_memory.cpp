#include "core/device_memory.h"

#include <algorithm>
#include <utility>

#include "base/thread_local.h"
#include "core/cpu_pool.h"

namespace mybackend {
namespace {

MYBACKEND_HOT_THREAD_LOCAL int t_kind = -1;          // -1: the configuration's
thread_local const std::string* t_folder = nullptr;  // of mmap; nullptr: the configuration's

}  // namespace

std::optional<MemoryKind> memory_kind_from_name(std::string_view name) {
  if (name == "caching") return MemoryKind::kCaching;
  if (name == "pool") return MemoryKind::kPool;
  if (name == "mmap") return MemoryKind::kMmap;
  return std::nullopt;
}

const char* memory_kind_name(MemoryKind kind) noexcept {
  switch (kind) {
    case MemoryKind::kCaching: return "caching";
    case MemoryKind::kPool: return "pool";
    case MemoryKind::kMmap: return "mmap";
  }
  return "unknown";
}

ScopedMemoryKind::ScopedMemoryKind(MemoryKind kind, std::optional<std::string> mmap_folder)
    : previous_(t_kind), folder_(std::move(mmap_folder)), previous_folder_(t_folder) {
  t_kind = static_cast<int>(kind);
  t_folder = folder_.has_value() ? &*folder_ : nullptr;
}
ScopedMemoryKind::~ScopedMemoryKind() {
  t_kind = previous_;
  t_folder = previous_folder_;
}

DeviceMemory::DeviceMemory(std::unique_ptr<Driver> driver, Config* config) : driver_(std::move(driver)), config_(config) {
  const Settings settings = config_->settings();
  for (int device = 0; device < driver_->device_count(); ++device) {
    devices_.push_back(std::make_unique<PerDevice>(driver_.get(), device, settings));
  }
  const auto apply = [this](const Settings& changed) {
    for (auto& device : devices_) device->caching.apply_settings(changed);
    {
      std::lock_guard lock(mapped_mutex_);
      for (auto& m : mapped_) m->caching.apply_settings(mapped_settings(changed));
    }
    set_default_kind(memory_kind_from_name(changed.backend).value_or(MemoryKind::kCaching));
  };
  apply(settings);
  config_->on_change(apply);
}

DeviceMemory::~DeviceMemory() = default;

MemoryKind DeviceMemory::kind_in_force() const noexcept {
  return t_kind >= 0 ? static_cast<MemoryKind>(t_kind) : default_kind_.load(std::memory_order_relaxed);
}

void* DeviceMemory::allocate(int device, std::size_t bytes, StreamHandle stream, AllocationFailure* failure) {
  if (bytes == 0) return nullptr;
  const MemoryKind kind = kind_in_force();
  PerDevice& d = *devices_[static_cast<std::size_t>(device)];
  if (kind != MemoryKind::kCaching && !driver_->is_host_memory()) {
    failure->code = StatusCode::kNotSupported;
    failure->message =
        std::string("backend:") + memory_kind_name(kind) + " is host memory; the driver " + driver_->name() + " has backend:caching only";
    return nullptr;
  }
  if (kind == MemoryKind::kMmap) return allocate_mapped(device, bytes, stream, failure);
  if (kind != MemoryKind::kCaching || !caching_enabled_.load(std::memory_order_relaxed)) {
    return allocate_other(device, bytes, kind, failure);
  }
  std::unique_ptr<caching::OomReport> report;
  void* ptr = nullptr;
  try {
    ptr = d.caching.allocate(bytes, stream, &report);
  } catch (const std::bad_alloc&) {
    fail(device, bytes, "mybackend: the host has no memory for the allocator's records", failure);
    return nullptr;
  }
  if (ptr == nullptr) return report_failure(device, bytes, *report, failure);
  d.tracker.track_alloc(bytes);
  return ptr;
}

void* DeviceMemory::report_failure(int device, std::size_t bytes, const caching::OomReport& report, AllocationFailure* failure) const {
  failure->code = report.driver_failed ? StatusCode::kFailed : StatusCode::kOutOfMemory;
  const TrackerStats live = devices_[static_cast<std::size_t>(device)]->tracker.stats();
  failure->message = oom_text(report, config_->settings()) + " Requested " + std::to_string(bytes) + " bytes; live " +
                     std::to_string(live.current_bytes) + " bytes, peak " + std::to_string(live.peak_bytes) + " bytes.";
  return nullptr;
}

void DeviceMemory::fail(int device, std::size_t bytes, std::string message, AllocationFailure* failure) const {
  const TrackerStats live = devices_[static_cast<std::size_t>(device)]->tracker.stats();
  failure->code = StatusCode::kOutOfMemory;
  failure->message = std::move(message) + ". Requested " + std::to_string(bytes) + " bytes; live " + std::to_string(live.current_bytes) +
                     " bytes, peak " + std::to_string(live.peak_bytes) + " bytes.";
}

void* DeviceMemory::allocate_other(int device, std::size_t bytes, MemoryKind kind, AllocationFailure* failure) {
  void* ptr = nullptr;
  const bool from_driver = kind == MemoryKind::kCaching;
  if (from_driver) {
    if (Status status = driver_->memory_allocate(device, bytes, &ptr); !status.ok()) {
      fail(device, bytes, "mybackend out of memory (no caching): " + status.message(), failure);
      return nullptr;
    }
  } else {
    if (bytes < (std::size_t{1} << 60)) ptr = cpu_pool::allocate(bytes);
    if (ptr == nullptr) {
      fail(device, bytes, "mybackend out of memory: the system refused " + std::to_string(bytes) + " bytes to the pool", failure);
      return nullptr;
    }
  }
  Shard& shard = shard_of(ptr);
  {
    std::lock_guard lock(shard.mutex);
    shard.pointers.emplace(ptr, OtherPointer{device, bytes, from_driver});
  }
  other_count_.fetch_add(1, std::memory_order_relaxed);
  tracker(device).track_alloc(bytes);
  return ptr;
}

// --- Mapped memory ------------------------------------------------------------------------------

Settings DeviceMemory::mapped_settings(Settings settings) {
  settings.expandable_segments = false;        // a mapping is one piece
  settings.per_process_memory_fraction = 1.0;  // of the device, not of a disk
  settings.garbage_collection_threshold = 0;   // goes with a fraction
  return settings;
}

// What is the device's stands in the history of its caching allocator.
caching::HistoryOptions DeviceMemory::mapped_history(caching::HistoryOptions options) {
  for (caching::Action action : {caching::Action::kSettings, caching::Action::kFraction, caching::Action::kSnapshot}) {
    options.skipped |= std::uint32_t{1} << static_cast<int>(action);
  }
  return options;
}

DeviceMemory::Mapped& DeviceMemory::mapped(int device, const std::string& folder) {
  std::lock_guard lock(mapped_mutex_);
  for (auto& m : mapped_) {
    if (m->device == device && !m->inherited && m->driver.folder() == folder) return *m;
  }
  mapped_.push_back(std::make_unique<Mapped>(driver_.get(), device, folder, mapped_settings(config_->settings())));
  if (history_.has_value()) mapped_.back()->caching.start_history(mapped_history(*history_));
  mapped_count_.store(mapped_.size(), std::memory_order_release);
  return *mapped_.back();
}

void* DeviceMemory::allocate_mapped(int device, std::size_t bytes, StreamHandle stream, AllocationFailure* failure) {
  try {
    const std::string folder = t_folder != nullptr ? *t_folder : config_->settings().mmap_dir;
    std::unique_ptr<caching::OomReport> report;
    void* ptr = mapped(device, folder).caching.allocate(bytes, stream, &report);
    if (ptr == nullptr) return report_failure(device, bytes, *report, failure);
    tracker(device).track_alloc(bytes);
    return ptr;
  } catch (const std::bad_alloc&) {
    fail(device, bytes, "mybackend: the host has no memory for the allocator's records", failure);
    return nullptr;
  }
}

bool DeviceMemory::free_mapped(void* ptr) noexcept {
  if (mapped_count_.load(std::memory_order_acquire) == 0) return false;
  std::lock_guard lock(mapped_mutex_);
  for (auto& m : mapped_) {
    std::size_t requested_bytes = 0;
    if (m->caching.free(ptr, &requested_bytes) != caching::FreeResult::kFreed) continue;
    tracker(m->device).track_free(requested_bytes);
    return true;
  }
  return false;
}

void DeviceMemory::for_each_caching(int device, const std::function<void(caching::CachingAllocator&)>& visit) {
  visit(caching(device));
  std::vector<caching::CachingAllocator*> found;
  {
    std::lock_guard lock(mapped_mutex_);
    for (auto& m : mapped_) {
      if (m->device == device) found.push_back(&m->caching);
    }
  }
  for (caching::CachingAllocator* allocator : found) visit(*allocator);
}

void DeviceMemory::start_history(const caching::HistoryOptions& options, bool clear_old) {
  {
    std::lock_guard lock(mapped_mutex_);
    history_ = options;
    history_entries_ = std::max<std::size_t>(options.max_entries, 1);
  }
  for (int device = 0; device < device_count(); ++device) {
    const caching::CachingAllocator* own = &caching(device);
    for_each_caching(device, [&](caching::CachingAllocator& allocator) {
      allocator.start_history(&allocator == own ? options : mapped_history(options), clear_old);
    });
  }
}

std::vector<caching::TraceEntry> DeviceMemory::history(int device) {
  std::vector<caching::TraceEntry> entries;
  for_each_caching(device, [&](caching::CachingAllocator& allocator) {
    for (caching::TraceEntry& entry : allocator.history()) entries.push_back(std::move(entry));
  });
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.time_us < b.time_us; });
  std::lock_guard lock(mapped_mutex_);
  if (entries.size() > history_entries_) {
    entries.erase(entries.begin(), entries.end() - static_cast<std::ptrdiff_t>(history_entries_));
  }
  return entries;
}

void DeviceMemory::stop_history() {
  {
    std::lock_guard lock(mapped_mutex_);
    history_.reset();
  }
  for (int device = 0; device < device_count(); ++device) {
    for_each_caching(device, [](caching::CachingAllocator& allocator) { allocator.stop_history(); });
  }
}

caching::DeviceStats DeviceMemory::stats(int device) {
  caching::DeviceStats sum = caching(device).stats();
  bool first = true;
  for_each_caching(device, [&](caching::CachingAllocator& allocator) {
    if (std::exchange(first, false)) return;
    const caching::DeviceStats more = allocator.stats();
    const auto add = [](caching::Stat& to, const caching::Stat& from) {
      to.current += from.current;
      to.peak += from.peak;
      to.allocated += from.allocated;
      to.freed += from.freed;
    };
#define X(name) \
  for (int i = 0; i < caching::kStatPoolCount; ++i) add(sum.name[i], more.name[i]);
    MYBACKEND_STAT_ARRAYS(X)
#undef X
#define X(name) add(sum.name, more.name);
    MYBACKEND_STAT_SINGLES(X)
#undef X
#define X(name) sum.name += more.name;
    MYBACKEND_STAT_COUNTS(X)
#undef X
  });
  return sum;
}

void DeviceMemory::stop_capturing() {
  for (int device = 0; device < device_count(); ++device) {
    for_each_caching(device, [](caching::CachingAllocator& allocator) { allocator.stop_capturing(); });
  }
}

bool DeviceMemory::free(void* ptr, int device) noexcept {
  if (device_count() == 1) device = 0;
  if (device >= 0 && device < device_count()) {
    PerDevice& d = *devices_[static_cast<std::size_t>(device)];
    std::size_t requested_bytes = 0;
    if (d.caching.free(ptr, &requested_bytes) == caching::FreeResult::kFreed) {
      d.tracker.track_free(requested_bytes);
      return true;
    }
  }
  device = device_of(ptr);
  if (device >= 0) {
    PerDevice& d = *devices_[static_cast<std::size_t>(device)];
    std::size_t requested_bytes = 0;
    if (d.caching.free(ptr, &requested_bytes) == caching::FreeResult::kFreed) {
      d.tracker.track_free(requested_bytes);
      return true;
    }
  }
  return free_mapped(ptr) || free_other(ptr);
}

bool DeviceMemory::free_other(void* ptr) noexcept {
  if (other_count_.load(std::memory_order_relaxed) == 0) return false;
  OtherPointer pointer;
  {
    Shard& shard = shard_of(ptr);
    std::lock_guard lock(shard.mutex);
    auto found = shard.pointers.find(ptr);
    if (found == shard.pointers.end()) return false;
    pointer = found->second;
    shard.pointers.erase(found);
  }
  other_count_.fetch_sub(1, std::memory_order_relaxed);
  if (pointer.from_driver) {
    (void)driver_->memory_free(pointer.device, ptr);
  } else {
    // The pool knows no streams: what is queued may still use the block.
    if (driver_->maybe_busy(pointer.device)) (void)driver_->device_synchronize(pointer.device);
    cpu_pool::deallocate(ptr, pointer.bytes);
  }
  tracker(pointer.device).track_free(pointer.bytes);
  return true;
}

int DeviceMemory::device_of(const void* ptr) const noexcept {
  const int device = driver_->device_of(ptr);
  if (device >= 0) return device;
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    if (devices_[i]->caching.owns_from_source(ptr)) return static_cast<int>(i);
  }
  return -1;
}

bool DeviceMemory::owns(const void* ptr) const noexcept {
  if (device_of(ptr) >= 0) return true;
  if (mapped_count_.load(std::memory_order_acquire) != 0) {
    std::lock_guard lock(mapped_mutex_);
    for (auto& m : mapped_) {
      if (m->caching.owns(ptr)) return true;
    }
  }
  if (other_count_.load(std::memory_order_relaxed) == 0) return false;
  Shard& shard = shard_of(ptr);
  std::lock_guard lock(shard.mutex);
  return shard.pointers.count(ptr) != 0;
}

void DeviceMemory::record_stream(void* ptr, StreamHandle stream) {
  const int device = device_of(ptr);
  if (device >= 0) return caching(device).record_stream(ptr, stream);
  std::lock_guard lock(mapped_mutex_);
  for (auto& m : mapped_) m->caching.record_stream(ptr, stream);
}

DeviceMemory::Shard& DeviceMemory::shard_of(const void* ptr) const noexcept {
  return shards_[(reinterpret_cast<std::uintptr_t>(ptr) >> 6) % kShardCount];
}

bool DeviceMemory::lock_for_fork() {
  mapped_mutex_.lock();
  for (auto& m : mapped_) {
    m->caching.lock_for_fork();
    (void)m->driver.prepare_fork();
  }
  for (auto& device : devices_) device->caching.lock_for_fork();
  for (Shard& shard : shards_) shard.mutex.lock();
  return driver_->prepare_fork().ok();
}

void DeviceMemory::unlock_after_fork(bool in_child) {
  if (in_child)
    driver_->after_fork_in_child();
  else
    driver_->after_fork_in_parent();
  for (Shard& shard : shards_) shard.mutex.unlock();
  for (auto& device : devices_) device->caching.unlock_after_fork();
  for (auto& m : mapped_) {
    m->driver.after_fork_in_parent();
    m->caching.unlock_after_fork();
    m->inherited = m->inherited || in_child;
  }
  mapped_mutex_.unlock();
}

}  // namespace mybackend
