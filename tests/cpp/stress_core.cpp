// Random operations on the caching allocator with the invariants checked after each one, under
// scripted driver faults; threads on one device; the CPU pool from many threads.
//
// usage: stress_core OPERATIONS [SEED] [--threads-only]
// On a failure it prints the configuration, the seed and the last operations, which replay it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "core/aligned_bytes.h"
#include "core/caching/caching_allocator.h"
#include "core/device_memory.h"
#include "driver/sim/sim_driver.h"

using namespace mybackend;
using caching::CachingAllocator;

namespace {

[[noreturn]] void die(const std::string& what, const std::deque<std::string>& log) {
  std::fprintf(stderr, "FAILED: %s\nlast operations:\n", what.c_str());
  for (const std::string& line : log) std::fprintf(stderr, "  %s\n", line.c_str());
  std::exit(1);
}

std::unique_ptr<SimDriver> make_sim(std::size_t capacity_bytes) {
  std::unique_ptr<SimDriver> driver;
  SimOptions options;
  options.capacity_bytes = capacity_bytes;
  if (Status status = SimDriver::create(options, &driver); !status.ok()) die(status.message(), {});
  return driver;
}

class Fuzzer {
 public:
  Fuzzer(const char* conf, unsigned seed) : conf_(conf), random_(seed), driver_(make_sim(512 * kMiB)) {
    Settings settings;
    if (Status status = parse_settings(conf, &settings); !status.ok()) die(status.message(), {});
    allocator_ = std::make_unique<CachingAllocator>(driver_.get(), 0, settings);
    for (StreamHandle& stream : streams_) (void)driver_->stream_create(0, 0, &stream);
    streams_[0] = kDefaultStream;
  }

  void run(long operations) {
    for (long i = 0; i < operations; ++i) {
      step();
      if (std::string wrong = allocator_->check_invariants(); !wrong.empty()) die(conf_ + ": " + wrong, log_);
    }
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
  }

 private:
  std::size_t pick(std::size_t below) { return random_() % below; }

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
      const caching::PoolId pool{0, 1 + pick(3)};
      if (begun_[pool] == 0 && pick(2) == 0) {
        note("begin pool " + std::to_string(pool.second));
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
  std::mt19937_64 random_;
  std::unique_ptr<SimDriver> driver_;
  std::unique_ptr<CachingAllocator> allocator_;
  StreamHandle streams_[4] = {};
  std::vector<void*> live_;
  std::map<caching::PoolId, int> begun_, used_;
  std::deque<std::string> log_;
};

// Eight threads on one device; every block is freed by another thread than its own.
void threads_on_one_device(long operations) {
  Config config;
  DeviceMemory memory(make_sim(2 * kGiB), &config);
  constexpr int kThreads = 8;
  struct Mailbox {
    std::mutex mutex;
    std::vector<void*> blocks;
  } mailboxes[kThreads];
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      std::mt19937_64 random(static_cast<unsigned>(index));
      for (long i = 0; i < operations / kThreads; ++i) {
        AllocationFailure failure;
        const std::size_t bytes = 1 + random() % (random() % 4 == 0 ? 3 * kMiB : 20000);
        if (void* ptr = memory.allocate(0, bytes, kDefaultStream, &failure)) {
          Mailbox& to = mailboxes[random() % kThreads];
          std::lock_guard lock(to.mutex);
          to.blocks.push_back(ptr);
        }
        std::vector<void*> mine;
        {
          std::lock_guard lock(mailboxes[index].mutex);
          if (mailboxes[index].blocks.size() > 10) mine.swap(mailboxes[index].blocks);
        }
        for (void* ptr : mine) {
          if (!memory.free(ptr)) die("threads: a block is not known", {});
        }
        if (random() % 512 == 0) memory.caching(0).empty_cache();
        auto block = allocate_aligned_bytes(1 + random() % 9000);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (std::string wrong = memory.caching(0).check_invariants(); !wrong.empty()) die("threads: " + wrong, {});
  for (Mailbox& mailbox : mailboxes) {
    for (void* ptr : mailbox.blocks) memory.free(ptr);
  }
  const TrackerStats stats = memory.tracker(0).stats();
  if (stats.current_bytes != 0 || stats.allocation_count != stats.free_count) die("threads: bytes are lost", {});
  if (aligned_bytes_tracker(mybackend::Device::CPU).stats().current_bytes != 0) die("threads: pool bytes are lost", {});
}

// Streams: work in order, events, errors that surface at the next synchronization.
void streams() {
  auto driver = make_sim(64 * kMiB);
  StreamHandle a = 0, b = 0;
  (void)driver->stream_create(0, 0, &a);
  (void)driver->stream_create(0, 0, &b);
  EventHandle event = 0;
  (void)driver->event_create(0, &event);
  int value = 0;
  for (int i = 0; i < 100; ++i) {
    (void)driver->stream_enqueue(0, a, "add", [&] { value += 1; });
    (void)driver->event_record(0, event, a);
    (void)driver->stream_wait_event(0, b, event);
    (void)driver->stream_enqueue(0, b, "double", [&] { value *= 2; });
    (void)driver->event_record(0, event, b);
    (void)driver->stream_wait_event(0, a, event);
    if (i % 10 == 9) {
      (void)driver->device_synchronize(0);
      value = 0;
    }
  }
  (void)driver->stream_enqueue(0, a, "throw", [] { throw std::runtime_error("planned"); });
  const Status status = driver->stream_synchronize(0, a);
  if (status.ok() || status.message().find("planned") == std::string::npos) die("streams: the error of a task was lost", {});
  if (!driver->stream_synchronize(0, a).ok()) die("streams: an error was given twice", {});
  driver->event_destroy(0, event);
}

}  // namespace

int main(int argc, char** argv) {
  const long operations = argc > 1 ? std::atol(argv[1]) : 20000;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atol(argv[2])) : 1;
  const bool threads_only = argc > 3 && std::strcmp(argv[3], "--threads-only") == 0;
  if (!threads_only) {
    const char* configurations[] = {"",
                                    "expandable_segments:True",
                                    "max_split_size_mb:32,garbage_collection_threshold:0.5",
                                    "roundup_power2_divisions:4",
                                    "expandable_segments:True,max_split_size_mb:32",
                                    "throw_on_cudamalloc_oom:True",
                                    "release_lock_on_cudamalloc:True,large_segment_size_mb:64"};
    for (const char* conf : configurations) {
      Fuzzer fuzzer(conf, seed);
      fuzzer.run(operations / static_cast<long>(std::size(configurations)));
    }
  }
  threads_on_one_device(operations);
  streams();
  std::puts("ok");
}
