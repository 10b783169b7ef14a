// What an out-of-memory error tells: the numbers, and only advice that would have helped.
#include <cstdio>
#include <string_view>

#include "core/caching/caching_allocator.h"

namespace mybackend::caching {
namespace {

std::string size_text(std::size_t bytes) {
  char buffer[64];
  if (bytes >= kGiB)
    std::snprintf(buffer, sizeof buffer, "%.2f GiB", static_cast<double>(bytes) / static_cast<double>(kGiB));
  else if (bytes >= kMiB)
    std::snprintf(buffer, sizeof buffer, "%.2f MiB", static_cast<double>(bytes) / static_cast<double>(kMiB));
  else if (bytes >= kKiB)
    std::snprintf(buffer, sizeof buffer, "%.2f KiB", static_cast<double>(bytes) / static_cast<double>(kKiB));
  else
    std::snprintf(buffer, sizeof buffer, "%zu bytes", bytes);
  return buffer;
}

}  // namespace

std::string oom_text(const OomReport& r, const Settings& settings) {
  // People and programs look for these words.
  const std::string_view driver = r.driver_name;
  const char* who = driver == "cuda" ? "CUDA" : driver == "hip" ? "HIP" : "mybackend";
  std::string text = std::string(who) + " out of memory. Tried to allocate " + size_text(r.requested_bytes);
  if (r.requested_bytes >= (std::size_t{1} << 60)) return text + ": more than 1EB.";
  text += " (" + std::to_string(r.requested_bytes) + " bytes; rounded to " + std::to_string(r.rounded_bytes) + ", in a segment of " +
          size_text(r.segment_bytes) + ") on stream " + std::to_string(r.stream) + ".";
  text += " Device " + std::to_string(r.device) + " has " + size_text(r.free_bytes) + " free of " + size_text(r.total_bytes) + ".";
  if (r.limit_bytes != kUnlimitedBytes) text += " This process may reserve " + size_text(r.limit_bytes) + " (memory fraction).";
  const std::size_t pending = r.pending_event_bytes;
  const std::size_t cached = r.reserved_bytes - r.allocated_bytes - pending;
  text += " It has " + size_text(r.allocated_bytes) + " allocated and " + size_text(cached) + " reserved but free";
  if (pending > 0) text += ", and " + size_text(pending) + " freed but still used by other streams";
  text += ".";
  if (r.cached_same_stream_bytes > 0) {
    text += " Of the free memory, " + size_text(r.cached_same_stream_bytes) + " is in this pool and stream, the largest block of " +
            size_text(r.largest_same_stream_bytes) + ".";
  }
  if (r.cached_other_streams_bytes > 0) text += " " + size_text(r.cached_other_streams_bytes) + " is cached for other streams.";
  if (r.private_pool_free_bytes > 0) text += " " + size_text(r.private_pool_free_bytes) + " is free in private pools.";
  if (!r.driver_message.empty()) text += " The driver said: " + r.driver_message + ".";

  if (r.limit_bytes != kUnlimitedBytes && r.segment_bytes <= r.free_bytes) {
    text += " The device has room: a larger memory fraction would have been enough.";
  }
  if (!settings.expandable_segments && r.cached_same_stream_bytes >= r.rounded_bytes) {
    text += " The free blocks of this stream are enough together: expandable_segments:True avoids this fragmentation.";
  }
  if (r.segment_bytes <= r.free_bytes + r.private_pool_free_bytes && r.segment_bytes > r.free_bytes) {
    text += " Releasing unused private pools would have been enough.";
  }
  return text;
}

}  // namespace mybackend::caching
