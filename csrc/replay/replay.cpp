#include "replay/replay.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace mybackend::replay {
namespace {

using caching::CachingAllocator;
using caching::OomReport;

// Streams of a trace are numbered; the reference gave stream N this handle, and the order in
// which streams are looked at depends on handles.
StreamHandle handle_of(std::uint64_t stream) {
  return stream * 0x1000;
}
std::uint64_t number_of(StreamHandle handle) {
  return handle / 0x1000;
}

struct Runner {
  ModelDriver driver;
  Settings settings;
  std::unique_ptr<CachingAllocator> allocator;
  std::vector<void*> live;
  std::vector<std::int64_t>* oom_ids = nullptr;
  std::unique_ptr<OomReport> last_oom;

  explicit Runner(std::size_t capacity_bytes) : driver(capacity_bytes) {}

  Status prepare(const Trace& trace, const ReplayOptions& options) {
    if (Status status = parse_settings(options.conf, &settings); !status.ok()) return status;
    allocator = std::make_unique<CachingAllocator>(&driver, 0, settings);
    live.assign(trace.ids.size(), nullptr);
    return {};
  }

  Status step(const Trace& trace, const TraceEvent& event) {
    switch (event.kind) {
      case 'a':
        live[event.id] = allocator->allocate(event.bytes, handle_of(event.stream), &last_oom);
        if (live[event.id] == nullptr && event.bytes != 0 && oom_ids != nullptr) oom_ids->push_back(trace.ids[event.id]);
        return {};
      case 'f':
        if (live[event.id] != nullptr) allocator->free(std::exchange(live[event.id], nullptr));
        return {};
      case 'r':
        if (live[event.id] != nullptr) allocator->record_stream(live[event.id], handle_of(event.stream));
        return {};
      case 'q': driver.advance(handle_of(event.stream)); return {};
      case 'e': allocator->empty_cache(); return {};
      case 'p': allocator->reset_peak_stats(); return {};
      case 'm': return allocator->set_memory_fraction(event.fraction);
      case 'b': return allocator->begin_allocate_to_pool({0, event.id}, [](StreamHandle) { return true; });
      case 'n': return allocator->end_allocate_to_pool({0, event.id});
      case 'd': return allocator->release_pool({0, event.id});
      default: return {};
    }
  }
};

}  // namespace

Status run(const Trace& trace, const ReplayOptions& options, ReplayResult* out) {
  Runner runner(options.capacity_bytes);
  if (Status status = runner.prepare(trace, options); !status.ok()) return status;
  runner.oom_ids = &out->oom_ids;
  runner.allocator->start_history({.max_entries = static_cast<std::size_t>(-1)});
  std::size_t number = 0;
  for (const TraceEvent& event : trace.events) {
    ++number;
    if (Status status = runner.step(trace, event); !status.ok()) {
      return {status.code(), "trace, event " + std::to_string(number) + " (" + event.kind + "): " + status.message()};
    }
    if (!options.check_invariants) continue;
    if (const std::string wrong = runner.allocator->check_invariants(); !wrong.empty()) {
      return {StatusCode::kFailed, "trace, event " + std::to_string(number) + " (" + event.kind + "): broken invariant: " + wrong};
    }
  }
  out->stats = runner.allocator->stats();
  out->driver = runner.driver.counts();
  out->segments = runner.allocator->snapshot(false);
  out->actions = runner.allocator->history();
  std::erase_if(out->actions, [](const caching::TraceEntry& action) { return caching::is_own_action(action.action); });
  for (caching::SegmentInfo& segment : out->segments) segment.stream = number_of(segment.stream);
  for (caching::TraceEntry& action : out->actions) action.stream = number_of(action.stream);
  if (!out->oom_ids.empty()) out->oom_text = oom_text(*runner.last_oom, runner.settings);
  return {};
}

Status benchmark(const Trace& trace, const ReplayOptions& options, int repeat, double* ns_per_event) {
  if (trace.events.empty()) return {StatusCode::kInvalidArgument, "the trace has no events"};
  if (repeat < 1) return {StatusCode::kInvalidArgument, "repeat must be at least 1"};
  Runner runner(options.capacity_bytes);
  if (Status status = runner.prepare(trace, options); !status.ok()) return status;
  double best = 1e300;
  for (int pass = 0; pass < repeat; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    for (const TraceEvent& event : trace.events) {
      if (Status status = runner.step(trace, event); !status.ok()) return status;
    }
    const auto end = std::chrono::steady_clock::now();
    best = std::min(best, std::chrono::duration<double, std::nano>(end - start).count() / static_cast<double>(trace.events.size()));
    for (void*& ptr : runner.live) {
      if (ptr != nullptr) runner.allocator->free(std::exchange(ptr, nullptr));
    }
  }
  *ns_per_event = best;
  return {};
}

double thread_throughput(int thread_count, long pairs) {
  ModelDriver driver(std::size_t{64} << 30);
  CachingAllocator allocator(&driver, 0, Settings());
  std::atomic<int> waiting{thread_count};
  std::vector<std::thread> threads;
  const auto work = [&](std::uint64_t seed) {
    waiting.fetch_sub(1);
    while (waiting.load() > 0) std::this_thread::yield();
    for (long i = 0; i < pairs; ++i) {
      seed = seed * 6364136223846793005ull + 1442695040888963407ull;
      allocator.free(allocator.allocate(1 + (seed >> 48), kDefaultStream, nullptr));
    }
  };
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < thread_count; ++i) threads.emplace_back(work, static_cast<std::uint64_t>(i + 1));
  for (std::thread& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return static_cast<double>(pairs) * thread_count / seconds;
}

}  // namespace mybackend::replay
