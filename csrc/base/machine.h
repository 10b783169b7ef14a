// What the process may use of the machine.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <string>

#include "base/units.h"

namespace mybackend {

// Memory of the machine in bytes, or of the control group when that is less.
inline std::size_t machine_memory_bytes() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  std::size_t bytes = pages > 0 ? static_cast<std::size_t>(pages) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) : 4 * kGiB;
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    std::size_t limit = 0;  // "max" does not parse: no limit
    if (file >> limit && limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

}  // namespace mybackend
