// libFuzzer target: the input's bytes choose the operations on the caching allocator, and the
// faults of its driver. Built and run by scripts/sanitize.sh when clang is there.
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "allocator_fuzzer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const char* conf = mybackend::kFuzzedConfigurations[data[0] % std::size(mybackend::kFuzzedConfigurations)];
  std::size_t next = 1;
  // Two bytes a choice; the input's end is the end of the operations. What is asked after it is
  // part of an operation that is already begun.
  const auto choose = [&]() -> std::uint64_t {
    std::uint64_t value = 0;
    for (int i = 0; i < 2 && next < size; ++i) value = value << 8 | data[next++];
    return value;
  };
  mybackend::AllocatorFuzzer fuzzer(conf, choose);
  while (next < size) fuzzer.step_and_check();
  fuzzer.finish();
  return 0;
}
