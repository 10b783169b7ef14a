// Random operations on the caching allocator with the invariants checked after each one, under
// scripted driver faults; threads on one device; the CPU pool from many threads.
//
// usage: stress_core OPERATIONS [SEED] [--threads-only]
// On a failure it prints the configuration and the last operations; the seed replays it.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "allocator_fuzzer.h"
#include "core/aligned_bytes.h"
#include "core/cpu_allocator.h"
#include "core/device_memory.h"
#include "core/memory_plan.h"
#include "core/pinned_cache.h"

using namespace mybackend;

namespace {

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

// Host memory from many threads: the CPU allocator, pinned memory with copies queued on streams
// and events to come, plans that are used by several threads at once.
void host_memory(long operations) {
  auto driver = make_sim(64 * kMiB);
  constexpr int kThreads = 6;
  PinnedCache pinned;
  PinnedSettings settings;
  settings.total_cached_bytes = 8 * kMiB;
  settings.reserve_segment_bytes = kMiB;
  settings.background_thread = true;
  pinned.apply_settings(settings);
  cpu_allocator::large_cache().set_max_cached_bytes(64 * kMiB);
  PlanRecorder recorder;
  for (std::uintptr_t i = 1; i <= 64; ++i) {
    recorder.on_allocate(reinterpret_cast<void*>(i), 100 * i);
    if (i % 3 != 0) recorder.on_free(reinterpret_cast<void*>(i));
  }
  MemoryPlan plan = recorder.finish(64);
  if (const char* wrong = check_plan(plan, 64); *wrong != '\0') die(std::string("plan: ") + wrong, {});
  std::vector<char> arena(plan.arena_bytes);
  PlanSession session(plan, arena.data());
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      std::mt19937_64 random(static_cast<unsigned>(index));
      StreamHandle stream = 0;
      (void)driver->stream_create(0, 0, &stream);
      std::vector<char> target(64 * 1024);
      for (long i = 0; i < operations / kThreads; ++i) {
        const std::size_t bytes = 1 + random() % (random() % 8 == 0 ? 9 * kMiB : 30000);
        void* ptr = cpu_allocator::allocate(bytes);
        if (ptr == nullptr) die("host memory: no CPU block", {});
        std::memset(ptr, index, 64);
        cpu_allocator::deallocate(ptr);
        if (i % 8 == 0) {
          auto* block = static_cast<char*>(pinned.allocate(1 + random() % target.size()));
          if (block == nullptr) die("host memory: no pinned block", {});
          *block = static_cast<char>(index);
          pinned.record_use(block, driver.get(), 0, stream);
          (void)driver->copy_async(0, stream, target.data(), block, 1);
          if (!pinned.contains(block) || !pinned.free(block)) die("host memory: a pinned block is not known", {});
        }
        if (void* place = session.allocate(100 * (1 + random() % 64))) {
          *static_cast<char*>(place) = 1;
          if (!session.free(place)) die("plan: a place is not known", {});
        }
        if (i % 50 == 0) session.restart();
        if (i % 100 == 0) pinned.empty_cache();
        if (i % 128 == 0) cpu_allocator::trim();
        if (i % 500 == 0) {  // settings may change under way
          PinnedSettings changed = settings;
          changed.background_thread = i % 1000 == 0;
          changed.block_cached_bytes = kMiB;
          pinned.apply_settings(changed);
        }
      }
      (void)driver->stream_synchronize(0, stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  pinned.empty_cache();
  const PinnedStats stats = pinned.stats();
  if (stats.active_bytes.current != 0 || stats.reserved_bytes.current != 0) die("host memory: pinned bytes are lost", {});
  if (session.live_count() != 0) die("plan: places are lost", {});
  if (cpu_allocator::tracker().stats().current_bytes != 0) die("host memory: CPU bytes are lost", {});
  cpu_allocator::trim();
  if (cpu_allocator::large_cache().stats().cached_bytes != 0) die("host memory: blocks stayed cached", {});
}

// Mapped memory from many threads: a caching allocator over files, and regions of one file.
void mapped_memory(long operations) {
  char folder[] = "/tmp/mybackend-stress-XXXXXX";
  if (mkdtemp(folder) == nullptr) die("mapped memory: no folder", {});
  const std::string path = std::string(folder) + "/file";
  Config config;
  {
    DeviceMemory memory(make_sim(64 * kMiB), &config);
    std::vector<std::thread> threads;
    for (int index = 0; index < 4; ++index) {
      threads.emplace_back([&, index] {
        std::mt19937_64 random(static_cast<unsigned>(index));
        const ScopedMemoryKind kind(MemoryKind::kMmap, index % 2 == 0 ? folder : "");
        std::vector<void*> live;
        for (long i = 0; i < operations / 40; ++i) {
          AllocationFailure failure;
          if (void* ptr = memory.allocate(0, 1 + random() % (3 * kMiB), kDefaultStream, &failure)) {
            *static_cast<char*>(ptr) = 1;
            live.push_back(ptr);
          }
          if (live.size() > 8) {
            if (!memory.free(live.front())) die("mapped memory: a block is not known", {});
            live.erase(live.begin());
          }
          const std::size_t offset = random() % 100'000, bytes = 1 + random() % 50'000;
          std::unique_ptr<MappedRegion> region;
          if (Status status = MappedRegion::map_file(path, MapAccess::kShared, offset, bytes, &region); !status.ok()) {
            die("mapped memory: " + status.message(), {});
          }
          if (region != nullptr) {
            static_cast<volatile char*>(region->data())[index % static_cast<int>(bytes)] = 1;
            if (i % 100 == 0 && (!region->sync().ok() || resident_bytes(region->data(), region->bytes()) == 0))
              die("mapped memory: sync", {});
          }
          if (i % 64 == 0) memory.for_each_caching(0, [](caching::CachingAllocator& allocator) { allocator.empty_cache(); });
        }
        for (void* ptr : live) memory.free(ptr);
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (memory.tracker(0).stats().current_bytes != 0) die("mapped memory: bytes are lost", {});
    memory.for_each_caching(0, [](caching::CachingAllocator& allocator) {
      if (std::string wrong = allocator.check_invariants(); !wrong.empty()) die("mapped memory: " + wrong, {});
    });
  }
  std::remove(path.c_str());
  if (rmdir(folder) != 0) die("mapped memory: files were left behind", {});
}

}  // namespace

int main(int argc, char** argv) {
  const long operations = argc > 1 ? std::atol(argv[1]) : 20000;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atol(argv[2])) : 1;
  const bool threads_only = argc > 3 && std::strcmp(argv[3], "--threads-only") == 0;
  if (!threads_only) {
    for (const char* conf : kFuzzedConfigurations) {
      AllocatorFuzzer fuzzer(conf, std::mt19937_64(seed));
      for (long i = 0; i < operations / static_cast<long>(std::size(kFuzzedConfigurations)); ++i) fuzzer.step_and_check();
      fuzzer.finish();
    }
  }
  threads_on_one_device(operations);
  streams();
  host_memory(operations);
  mapped_memory(operations);
  std::puts("ok");
}
