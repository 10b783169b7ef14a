// Allocation traces: one event a line; empty lines and lines with # are comments.
//
//   a ID BYTES STREAM   allocate            f ID          free
//   r ID STREAM         record_stream       q STREAM      the stream catches up
//   e                   empty_cache         p             reset peak statistics
//   m FRACTION          memory fraction     b/n POOL      begin / end allocating to a pool
//   d POOL              release the pool
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace mybackend::replay {

struct TraceEvent {
  char kind = 0;
  std::uint32_t id = 0;  // a, f, r: dense index of the allocation; b, n, d: the pool
  std::uint64_t stream = 0;
  union {                   // long traces are read through in the timed loop: no more memory than needed
    std::size_t bytes = 0;  // a
    double fraction;        // m
  };
};

struct Trace {
  std::vector<TraceEvent> events;
  std::vector<std::int64_t> ids;  // the name of each allocation in the file, by index
};

// kInvalidArgument names the line (from 1) and what is wrong with it.
Status parse_trace(std::string_view text, Trace* out);

}  // namespace mybackend::replay
