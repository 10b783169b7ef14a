// The size rules: what a request is rounded up to, which pool serves it, and how large a
// segment is asked from the driver for it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>

#include "base/units.h"
#include "core/config.h"

namespace mybackend::caching {

inline constexpr std::size_t kMinBlockBytes = 512;
inline constexpr std::size_t kSmallBytes = kMiB;  // the largest request of the small pool
inline constexpr std::size_t kSmallSegmentBytes = 2 * kMiB;
inline constexpr std::size_t kMinOwnSegmentBytes = 10 * kMiB;  // from here a request gets its own segment
inline constexpr std::size_t kSegmentGranularityBytes = 2 * kMiB;
inline constexpr std::size_t kMaxRequestBytes = std::size_t{1} << 60;

// pre: bytes < kMaxRequestBytes. post: a multiple of 512, at least 512.
inline std::size_t round_request(std::size_t bytes, const Divisions& divisions_by_bucket) {
  if (bytes < kMinBlockBytes) return kMinBlockBytes;
  const int log2 = std::bit_width(bytes) - 1;
  const std::size_t bucket = static_cast<std::size_t>(std::clamp(log2 - 20, 0, 15));
  const std::size_t divisions = divisions_by_bucket[bucket];
  if (divisions > 1 && bytes > kMinBlockBytes * divisions) {
    if (is_power_of_two(bytes)) return bytes;
    const std::size_t floor = power_of_two_floor(bytes);
    const std::size_t step = floor >> (std::bit_width(divisions) - 1);
    return step == 0 ? 2 * floor : round_up(bytes, step);
  }
  return (bytes + kMinBlockBytes - 1) & ~(kMinBlockBytes - 1);
}

inline bool is_small(std::size_t rounded_bytes) {
  return rounded_bytes <= kSmallBytes;
}

inline std::size_t segment_bytes_for(std::size_t rounded_bytes, std::size_t large_segment_bytes) {
  if (is_small(rounded_bytes)) return kSmallSegmentBytes;
  if (rounded_bytes < kMinOwnSegmentBytes) return large_segment_bytes;
  return round_up(rounded_bytes, kSegmentGranularityBytes);
}

}  // namespace mybackend::caching
