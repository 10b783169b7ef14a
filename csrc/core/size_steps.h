// Size classes in eight steps per power of two: a block is at most 12.5 % larger than asked.
#pragma once

#include <bit>
#include <cstddef>

#include "base/units.h"

namespace mybackend {

// The class of a request, in bytes: the next multiple of an eighth of the power of two below
// it, and of `granularity` (a power of two). pre: 0 < bytes <= 2^62.
inline std::size_t step_class_bytes(std::size_t bytes, std::size_t granularity) noexcept {
  const std::size_t step = std::bit_floor(bytes) / 8;
  return round_up(bytes, step > granularity ? step : granularity);
}

}  // namespace mybackend
