// The memory of all devices: one driver, one caching allocator and one tracker per device, and
// the choice of the memory kind that a request gets.
//
//   kind       caching (default), pool (thread-local pool of host memory), mmap
//   in force   the `backend` key of the configuration, unless a ScopedMemoryKind of the calling
//              thread says otherwise
//   mmap       for each folder, and for anonymous memory, a caching allocator of its own per
//              device, over mappings instead of the device's memory (mmap_driver.h)
//
// A pointer remembers its kind by where it lies: caching memory lies in the driver's address
// ranges; pool pointers are in a table of their own. So any pointer can be freed without
// being told its kind.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/caching/caching_allocator.h"
#include "core/config.h"
#include "core/mmap_driver.h"
#include "core/tracker.h"
#include "driver/driver.h"

namespace mybackend {

enum class MemoryKind : unsigned char { kCaching, kPool, kMmap };

std::optional<MemoryKind> memory_kind_from_name(std::string_view name);
const char* memory_kind_name(MemoryKind kind) noexcept;

// The calling thread's choice while it lives.
class ScopedMemoryKind {
 public:
  // `mmap_folder`: where mmap puts its files; not given: the configuration's mmap_dir.
  explicit ScopedMemoryKind(MemoryKind kind, std::optional<std::string> mmap_folder = std::nullopt);
  ~ScopedMemoryKind();
  ScopedMemoryKind(const ScopedMemoryKind&) = delete;
  ScopedMemoryKind& operator=(const ScopedMemoryKind&) = delete;

 private:
  const int previous_;
  const std::optional<std::string> folder_;
  const std::string* previous_folder_;
};

struct AllocationFailure {
  StatusCode code = StatusCode::kOk;
  std::string message;
};

class DeviceMemory {
 public:
  // `config` outlives the object.
  DeviceMemory(std::unique_ptr<Driver> driver, Config* config);
  ~DeviceMemory();

  Driver& driver() noexcept { return *driver_; }
  int device_count() const noexcept { return static_cast<int>(devices_.size()); }
  caching::CachingAllocator& caching(int device) { return devices_[static_cast<std::size_t>(device)]->caching; }
  // Visits the caching allocator and those over mappings: what there is to empty, reset, record.
  void for_each_caching(int device, const std::function<void(caching::CachingAllocator&)>& visit);
  // The history of all of them, also of those that are made later.
  void start_history(const caching::HistoryOptions& options, bool clear_old);
  void stop_history();
  // Their entries in the order of time, the newest `max_entries`. Settings, fractions and
  // snapshots are the device's and stand in it once, however many allocators it has.
  std::vector<caching::TraceEntry> history(int device);
  // For the end of the process: later events get no context.
  void stop_capturing();
  // Summed over them. A peak is a sum of peaks: where kinds are mixed, an upper bound.
  caching::DeviceStats stats(int device);
  MemoryTracker& tracker(int device) { return devices_[static_cast<std::size_t>(device)]->tracker; }

  // nullptr for 0 bytes, and when it failed: then *failure says why. `device` is valid. Where the
  // device's memory is not the host's, kinds other than caching are kNotSupported.
  void* allocate(int device, std::size_t bytes, StreamHandle stream, AllocationFailure* failure);
  // False (and nothing changed) for a pointer that is not ours.
  // `device`: where it was allocated, if known; only a hint.
  bool free(void* ptr, int device = -1) noexcept;
  bool owns(const void* ptr) const noexcept;
  // The device whose caching allocator the pointer may belong to; -1 when there is none.
  int device_of(const void* ptr) const noexcept;
  void record_stream(void* ptr, StreamHandle stream);

  void set_default_kind(MemoryKind kind) noexcept { default_kind_.store(kind, std::memory_order_relaxed); }
  MemoryKind kind_in_force() const noexcept;

  // Without a cache (MYBACKEND_NO_MEMORY_CACHING=1) each request goes to the driver.
  void set_caching_enabled(bool enabled) noexcept { caching_enabled_.store(enabled); }
  bool caching_enabled() const noexcept { return caching_enabled_.load(); }
  const Config& config() const noexcept { return *config_; }

  // False when the driver cannot survive the fork.
  bool lock_for_fork();
  void unlock_after_fork(bool in_child);

 private:
  struct PerDevice {
    PerDevice(Driver* driver, int device, const Settings& settings) : caching(driver, device, settings) {}
    caching::CachingAllocator caching;
    MemoryTracker tracker;
  };
  // Pointers that do not lie in the caching allocator's memory, by address.
  struct OtherPointer {
    int device;
    std::size_t bytes;
    bool from_driver;
  };
  static constexpr std::size_t kShardCount = 16;
  struct alignas(64) Shard {
    mutable std::mutex mutex;
    std::unordered_map<const void*, OtherPointer> pointers;
  };
  struct Mapped {
    Mapped(Driver* base, int device, std::string folder, const Settings& settings)
        : device(device), driver(base, std::move(folder)), caching(&driver, device, settings) {}
    const int device;
    MmapDriver driver;
    caching::CachingAllocator caching;
    bool inherited = false;  // from before a fork: the parent uses its free blocks too
  };
  Mapped& mapped(int device, const std::string& folder);
  void* allocate_mapped(int device, std::size_t bytes, StreamHandle stream, AllocationFailure* failure);
  void* report_failure(int device, std::size_t bytes, const caching::OomReport& report, AllocationFailure* failure) const;
  static Settings mapped_settings(Settings settings);
  static caching::HistoryOptions mapped_history(caching::HistoryOptions options);
  bool free_mapped(void* ptr) noexcept;
  Shard& shard_of(const void* ptr) const noexcept;
  void* allocate_other(int device, std::size_t bytes, MemoryKind kind, AllocationFailure* failure);
  bool free_other(void* ptr) noexcept;
  void fail(int device, std::size_t bytes, std::string message, AllocationFailure* failure) const;

  std::unique_ptr<Driver> driver_;
  Config* const config_;
  std::vector<std::unique_ptr<PerDevice>> devices_;
  std::atomic<MemoryKind> default_kind_{MemoryKind::kCaching};
  std::atomic<bool> caching_enabled_{true};
  std::atomic<std::int64_t> other_count_{0};
  mutable std::array<Shard, kShardCount> shards_;
  mutable std::mutex mapped_mutex_;
  std::vector<std::unique_ptr<Mapped>> mapped_;     // only grows
  std::optional<caching::HistoryOptions> history_;  // while it is on
  std::size_t history_entries_ = 0;                 // at most, of the last one that was on
  std::atomic<std::size_t> mapped_count_{0};        // its size, to look at without the lock
};

}  // namespace mybackend
