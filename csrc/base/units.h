// Byte units, alignment and power-of-two arithmetic. Sizes are always bytes in a size_t and
// are named `_bytes`; nothing here allocates or throws.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace mybackend {

inline constexpr std::size_t kKiB = std::size_t{1} << 10;
inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr std::size_t kGiB = std::size_t{1} << 30;
inline constexpr std::size_t kUnlimitedBytes = std::numeric_limits<std::size_t>::max();

// Rounds `bytes` up to a multiple of `multiple` (any positive number). The caller rules out
// overflow: bytes + multiple - 1 must fit.
constexpr std::size_t round_up(std::size_t bytes, std::size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

constexpr bool is_power_of_two(std::size_t value) {
  return std::has_single_bit(value);
}

constexpr std::size_t power_of_two_floor(std::size_t value) {
  return std::bit_floor(value);
}

}  // namespace mybackend
