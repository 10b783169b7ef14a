// Runs a trace through the caching allocator on the model driver.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/caching/caching_allocator.h"
#include "driver/model/model_driver.h"
#include "replay/trace.h"

namespace mybackend::replay {

struct ReplayResult {
  caching::DeviceStats stats;
  ModelCounts driver;
  std::vector<caching::SegmentInfo> segments;
  std::vector<caching::TraceEntry> actions;
  std::vector<std::int64_t> oom_ids;
  std::string oom_text;  // of the last one
};

struct ReplayOptions {
  std::string conf;
  std::size_t capacity_bytes = 0;
  bool check_invariants = false;  // after every event; slow
};

// kInvalidArgument for a bad configuration or an event that cannot be (a pool that is not
// there), kFailed when an invariant broke.
Status run(const Trace& trace, const ReplayOptions& options, ReplayResult* out);

// Nanoseconds per event: the best of `repeat` passes over the trace, one allocator for all of
// them, with what is still allocated freed between passes, outside the time.
Status benchmark(const Trace& trace, const ReplayOptions& options, int repeat, double* ns_per_event);

// Allocate-and-free pairs a second of `thread_count` threads on one allocator, mixed sizes up to
// 64 KiB, `pairs` a thread; each block is freed by the thread that took it.
double thread_throughput(int thread_count, long pairs);

}  // namespace mybackend::replay
