// The allocator part of bench_cpu.py: nanoseconds per allocate-and-free pair, of the CPU pool
// (through the C ABI, exact counters included) or of malloc, whichever is preloaded.
//
// usage: bench_cpu ours|malloc
// Prints one JSON object: {"SIZE": ns per pair, ..., "churn": ns per pair}
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "capi/mybackend.h"

namespace {

struct Ours {
  static void* allocate(std::size_t bytes) { return mybackend_cpu_allocate(bytes); }
  static void free(void* ptr, std::size_t bytes) { mybackend_cpu_free(ptr, bytes); }
};
struct Malloc {
  static void* allocate(std::size_t bytes) {  // what PyTorch's CPU allocator calls
    void* ptr = nullptr;
    return posix_memalign(&ptr, 64, bytes) == 0 ? ptr : nullptr;
  }
  static void free(void* ptr, std::size_t) { std::free(ptr); }
};

double since_ns(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}

template <class Allocator>
double pairs(std::size_t bytes) {
  constexpr int kPairs = 200'000;
  double best = 1e300;
  for (int pass = 0; pass < 5; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kPairs; ++i) {
      void* ptr = Allocator::allocate(bytes);
      *static_cast<volatile char*>(ptr) = 1;
      Allocator::free(ptr, bytes);
    }
    best = std::min(best, since_ns(start) / kPairs);
  }
  return best;
}

// 256 live blocks of 64 B to 64 KB; each step frees one at random and allocates another.
template <class Allocator>
double churn() {
  constexpr int kLive = 256, kSteps = 1'000'000;
  std::uint64_t state = 1;
  const auto next = [&] { return (state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33; };
  struct Block {
    void* ptr;
    std::size_t bytes;
  };
  const auto size = [&] { return (std::size_t{64} << (next() % 11)) - next() % 32; };
  std::vector<Block> blocks(kLive);
  for (Block& block : blocks) {
    block.bytes = size();
    block.ptr = Allocator::allocate(block.bytes);
  }
  double best = 1e300;
  for (int pass = 0; pass < 5; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kSteps; ++i) {
      Block& block = blocks[next() % kLive];
      Allocator::free(block.ptr, block.bytes);
      block.bytes = size();
      block.ptr = Allocator::allocate(block.bytes);
      *static_cast<volatile char*>(block.ptr) = 1;
    }
    best = std::min(best, since_ns(start) / kSteps);
  }
  for (Block& block : blocks) Allocator::free(block.ptr, block.bytes);
  return best;
}

template <class Allocator>
void run() {
  std::printf("{");
  for (std::size_t bytes = 64; bytes <= (std::size_t{4} << 20); bytes *= 4) std::printf("\"%zu\": %.2f, ", bytes, pairs<Allocator>(bytes));
  std::printf("\"churn\": %.2f}\n", churn<Allocator>());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "ours") == 0)
    run<Ours>();
  else if (argc == 2 && std::strcmp(argv[1], "malloc") == 0)
    run<Malloc>();
  else
    return std::fprintf(stderr, "usage: bench_cpu ours|malloc\n"), 2;
}
