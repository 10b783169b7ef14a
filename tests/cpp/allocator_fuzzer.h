// Operations on the caching allocator with the invariants checked after each one, under scripted
// driver faults. What happens is chosen by a source of numbers: a random generator, or a fuzzer.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/caching/caching_allocator.h"
#include "driver/sim/sim_driver.h"

namespace mybackend {

// Prints what is wrong and the operations that led to it, and aborts: fuzzers and sanitizers
// notice an abort.
[[noreturn]] inline void die(const std::string& what, const std::deque<std::string>& log) {
  std::fprintf(stderr, "FAILED: %s\nlast operations:\n", what.c_str());
  for (const std::string& line : log) std::fprintf(stderr, "  %s\n", line.c_str());
  std::abort();
}

inline std::unique_ptr<SimDriver> make_sim(std::size_t capacity_bytes) {
  std::unique_ptr<SimDriver> driver;
  SimOptions options;
  options.capacity_bytes = capacity_bytes;
  if (Status status = SimDriver::create(options, &driver); !status.ok()) die(status.message(), {});
  return driver;
}

class AllocatorFuzzer {
 public:
  AllocatorFuzzer(const char* conf, std::function<std::uint64_t()> choose)
      : conf_(conf), choose_(std::move(choose)), driver_(make_sim(512 * kMiB)) {
    Settings settings;
    if (Status status = parse_settings(conf, &settings); !status.ok()) die(status.message(), {});
    allocator_ = std::make_unique<caching::CachingAllocator>(driver_.get(), 0, settings);
    for (StreamHandle& stream : streams_) (void)driver_->stream_create(0, 0, &stream);
    streams_[0] = kDefaultStream;
  }

  void step_and_check() {
    step();
    if (std::string wrong = allocator_->check_invariants(); !wrong.empty()) die(conf_ + ": " + wrong, log_);
  }

  // Frees everything: nothing may be lost.
  void finish() {
    driver_->faults().clear();
    for (const auto& [pool, begins] : begun_) {
      for (int i = 0; i < begins; ++i) (void)allocator_->end_allocate_to_pool(pool);
    }
    while (!live_.empty()) free_one();
    for (const auto& [pool, uses] : used_) {
      for (int i = 0; i < uses; ++i) (void)allocator_->release_pool(pool);
    }
    allocator_->empty_cache();
    allocator_->empty_cache();
    const caching::DeviceStats stats = allocator_->stats();
    if (stats.allocated_bytes[0].current != 0 || stats.active_bytes[0].current != 0) die(conf_ + ": bytes are lost", log_);
    if (stats.reserved_bytes[0].current != 0) die(conf_ + ": segments are lost", log_);
    MemoryInfo info;
    (void)driver_->memory_info(0, &info);
    if (info.free_bytes != info.total_bytes) die(conf_ + ": the device's memory is lost", log_);
    if (source_bytes_ != 0) die(conf_ + ": memory of a pool's own source is lost", log_);
  }

 private:
  std::size_t pick(std::size_t below) { return choose_() % below; }

  // Of pool 4: addresses without memory, close together, so that segments begin and end within the
  // same 2 MiB.
  std::shared_ptr<const caching::SegmentSource> make_source() {
    return std::make_shared<const caching::SegmentSource>(
        caching::SegmentSource{[this](std::size_t bytes, StreamHandle) -> void* {
                                 if (source_bytes_ + bytes > 128 * kMiB || pick(8) == 0) return nullptr;
                                 source_bytes_ += bytes;
                                 const std::uintptr_t address = next_source_address_;
                                 next_source_address_ += bytes + 512 * pick(3);
                                 return reinterpret_cast<void*>(address);
                               },
                               [this](void*, std::size_t bytes, StreamHandle) { source_bytes_ -= bytes; }});
  }

  void note(const std::string& line) {
    log_.push_back(line);
    if (log_.size() > 30) log_.pop_front();
  }

  std::size_t pick_size() {
    switch (pick(5)) {
      case 0: return 1 + pick(600);
      case 1: return 1 + pick(kMiB + 4096);
      case 2: return 1 + pick(12 * kMiB);
      case 3: return 1 + pick(60 * kMiB);
      default: return (std::size_t{1} << pick(27)) + pick(2);
    }
  }

  void free_one() {
    const std::size_t index = pick(live_.size());
    note("free " + std::to_string(index));
    if (allocator_->free(live_[index]) != caching::FreeResult::kFreed) die(conf_ + ": a live pointer was not known", log_);
    if (allocator_->free(live_[index]) == caching::FreeResult::kFreed) die(conf_ + ": a second free was accepted", log_);
    live_[index] = live_.back();
    live_.pop_back();
  }

  void step() {
    const std::size_t what = pick(100);
    if (what < 45) {
      const std::size_t bytes = pick_size();
      const StreamHandle stream = streams_[pick(4)];
      note("allocate " + std::to_string(bytes) + " on " + std::to_string(stream));
      if (void* ptr = allocator_->allocate(bytes, stream, nullptr)) live_.push_back(ptr);
    } else if (what < 78) {
      if (!live_.empty()) free_one();
    } else if (what < 84) {
      if (live_.empty()) return;
      note("record_stream");
      allocator_->record_stream(live_[pick(live_.size())], streams_[pick(4)]);
    } else if (what < 87) {
      note("empty_cache");
      allocator_->empty_cache();
    } else if (what < 89) {
      const double fraction = pick(2) == 0 ? 1.0 : 0.3 + 0.1 * static_cast<double>(pick(7));
      note("fraction " + std::to_string(fraction));
      (void)allocator_->set_memory_fraction(fraction);
    } else if (what < 92) {
      const caching::PoolId pool{0, 1 + pick(4)};
      if (begun_[pool] == 0 && pick(2) == 0) {
        note("begin pool " + std::to_string(pool.second));
        if (pool.second == 4) {
          allocator_->create_or_use_pool(pool, false, false, source_);
          ++used_[pool];
        }
        if (allocator_->begin_allocate_to_pool(pool, [](StreamHandle) { return true; }).ok()) ++begun_[pool], ++used_[pool];
      } else if (begun_[pool] > 0) {
        note("end pool " + std::to_string(pool.second));
        if (allocator_->end_allocate_to_pool(pool).ok()) --begun_[pool];
      } else if (used_[pool] > 0) {
        note("release pool " + std::to_string(pool.second));
        if (allocator_->release_pool(pool).ok()) --used_[pool];
      }
    } else if (what < 97) {
      const auto primitive = static_cast<Primitive>(pick(static_cast<std::size_t>(Primitive::kCount)));
      const auto code = pick(2) == 0 ? StatusCode::kOutOfMemory : StatusCode::kFailed;
      note(std::string("fault in ") + kPrimitiveNames[static_cast<int>(primitive)]);
      driver_->faults().fail(primitive, 1 + static_cast<std::int64_t>(pick(4)), code, 1 + static_cast<std::int64_t>(pick(3)));
    } else {
      driver_->faults().clear();
    }
  }

  std::string conf_;
  std::function<std::uint64_t()> choose_;
  std::unique_ptr<SimDriver> driver_;
  std::unique_ptr<caching::CachingAllocator> allocator_;
  std::shared_ptr<const caching::SegmentSource> source_ = make_source();
  std::size_t source_bytes_ = 0;
  std::uintptr_t next_source_address_ = 0x400000000200;
  StreamHandle streams_[4] = {};
  std::vector<void*> live_;
  std::map<caching::PoolId, int> begun_, used_;
  std::deque<std::string> log_;
};

inline constexpr const char* kFuzzedConfigurations[] = {"",
                                                        "expandable_segments:True",
                                                        "max_split_size_mb:32,garbage_collection_threshold:0.5",
                                                        "roundup_power2_divisions:4",
                                                        "expandable_segments:True,max_split_size_mb:32",
                                                        "throw_on_cudamalloc_oom:True",
                                                        "release_lock_on_cudamalloc:True,large_segment_size_mb:64"};

}  // namespace mybackend
