// CudaDriver on the stand-in for the driver library (tests/cuda_standin).
// usage: cuda_driver_test calls|each_call_fails_once|captures|reuse_in_captures|gone|pinned|sharing|random; prints "ok".
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/caching/caching_allocator.h"
#include "core/pinned_cache.h"
#include "driver/cuda/cuda_driver.h"

using namespace mybackend;

extern "C" {
void standin_fail(const char* symbol, std::int64_t n, int result);
std::int64_t standin_calls(const char* symbol);
void standin_advance(void* stream);
std::size_t standin_used_bytes(int device);
std::size_t standin_live_events();
int standin_accessor_count(void* ptr);
void standin_begin_capture(void* stream);
void standin_end_captures();
void standin_launch(void* stream);
void standin_set_gone(int gone);
void standin_set_capturing(int capturing);
}

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
      std::exit(1);                                                              \
    }                                                                            \
  } while (false)

namespace {

constexpr std::size_t kPage = 2 * kMiB;

std::unique_ptr<CudaDriver> make() {
  std::unique_ptr<CudaDriver> driver;
  const Status status = CudaDriver::create(cuda::Vendor::kCuda, &driver);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  CHECK(status.ok());
  return driver;
}

void* as_stream(StreamHandle stream) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream));
}

// Every call of the contract, its answers, and the refusals.
void calls() {
  auto driver = make();
  CHECK(std::string(driver->name()) == "cuda" && driver->device_count() == 2 && !driver->is_host_memory());
  DeviceInfo info;
  CHECK(driver->device_info(1, &info).ok() && info.page_bytes == kPage && info.multi_processor_count == 4);
  CHECK(driver->device_info(2, &info).code() == StatusCode::kInvalidArgument);

  void *a = nullptr, *b = nullptr;
  CHECK(driver->memory_allocate(1, 3 * kMiB, &a).ok() && driver->memory_allocate(0, 100, &b).ok());
  CHECK(driver->memory_allocate(0, 0, &b).code() == StatusCode::kInvalidArgument);
  CHECK(driver->device_of(a) == 1 && driver->device_of(static_cast<char*>(a) + 3 * kMiB - 1) == 1);
  CHECK(driver->device_of(static_cast<char*>(a) + 3 * kMiB) != 1 && driver->device_of(&info) == -1);
  MemoryInfo memory;
  CHECK(driver->memory_info(1, &memory).ok() && memory.total_bytes - memory.free_bytes == 4 * kMiB);
  CHECK(driver->memory_free(0, a).code() == StatusCode::kInvalidArgument);  // of the other device
  CHECK(driver->memory_free(0, static_cast<char*>(b) + 1).code() == StatusCode::kInvalidArgument);

  StreamHandle stream = 0;
  CHECK(driver->stream_create(1, -100, &stream).ok() && stream != 0);
  std::vector<char> host(1000, 'x'), back(1000);
  CHECK(driver->copy_async(1, stream, a, host.data(), 1000).ok() && driver->copy_async(1, stream, back.data(), a, 1000).ok());
  CHECK(driver->stream_synchronize(1, stream).ok() && back == host);
  int ran = 0;
  CHECK(driver->stream_enqueue(1, stream, "count", [&] { ++ran; }).ok());
  CHECK(driver->stream_enqueue(1, stream, "thrower", [] { throw std::runtime_error("on purpose"); }).ok());
  const Status failed = driver->stream_synchronize(1, stream);
  CHECK(ran == 1 && failed.code() == StatusCode::kFailed && failed.message() == "thrower: on purpose");
  CHECK(driver->stream_synchronize(1, stream).ok());  // told once

  EventHandle start = 0, end = 0;
  CHECK(driver->event_create(1, &start).ok() && driver->event_create(1, &end).ok());
  CHECK(driver->event_query(1, start).ok());  // never recorded: complete
  CHECK(driver->event_record(1, start, stream).ok() && driver->event_record(1, end, stream).ok());
  CHECK(driver->event_query(1, end).code() == StatusCode::kNotReady && driver->stream_query(1, stream).code() == StatusCode::kNotReady);
  standin_advance(as_stream(stream));
  CHECK(driver->event_query(1, end).ok() && driver->stream_query(1, stream).ok() && driver->stream_wait_event(1, 0, end).ok());
  std::int64_t ns = 0;
  CHECK(driver->event_elapsed_ns(start, end, &ns).ok() && ns == 1'000'000);
  driver->event_destroy(1, start);
  driver->event_destroy(1, start);
  CHECK(driver->event_query(1, start).code() == StatusCode::kInvalidArgument);
  driver->event_destroy(1, end);
  CHECK(standin_live_events() == 0);

  CHECK(driver->host_register(host.data(), 1000).ok() &&
        driver->host_register(host.data() + 500, 10).message().find("712") != std::string::npos);
  CHECK(driver->host_unregister(host.data()).ok() && driver->host_unregister(host.data()).message().find("713") != std::string::npos);

  void* range = nullptr;
  PhysicalHandle handle = 0;
  CHECK(driver->address_reserve(1, 10 * kPage, &range).ok() && driver->address_reserve(1, 100, &b).code() == StatusCode::kInvalidArgument);
  CHECK(driver->physical_create(1, 2 * kPage, &handle).ok() &&
        driver->physical_create(1, 5, &handle).code() == StatusCode::kInvalidArgument);
  char* place = static_cast<char*>(range) + 4 * kPage;
  CHECK(driver->memory_map(0, place, handle).code() == StatusCode::kInvalidArgument);
  CHECK(driver->memory_map(1, static_cast<char*>(range) + 9 * kPage, handle).code() == StatusCode::kInvalidArgument);
  CHECK(driver->memory_map(1, place, handle).ok());
  std::memset(place, 1, 2 * kPage);
  CHECK(driver->memory_map(1, range, handle).code() == StatusCode::kInvalidArgument);
  CHECK(driver->physical_release(1, handle).code() == StatusCode::kInvalidArgument);
  CHECK(driver->address_free(1, range, 10 * kPage).code() == StatusCode::kInvalidArgument);
  CHECK(driver->memory_unmap(1, range, handle).code() == StatusCode::kInvalidArgument);
  CHECK(driver->memory_unmap(1, place, handle).ok() && driver->physical_release(1, handle).ok());
  CHECK(driver->address_free(1, range, 10 * kPage).ok() &&
        driver->address_free(1, range, 10 * kPage).code() == StatusCode::kInvalidArgument);

  CHECK(driver->memory_free(1, a).ok() && driver->memory_free(1, a).code() == StatusCode::kInvalidArgument);
  CHECK(driver->prepare_fork().code() == StatusCode::kNotSupported);
  driver->after_fork_in_parent();
  CHECK(driver->device_of(&info) == -1);
  (void)driver->prepare_fork();
  const pid_t child = fork();
  if (child == 0) {
    driver->after_fork_in_child();
    _exit(driver->device_of(&info) == -1 && driver->event_query(0, 1).code() == StatusCode::kInvalidArgument ? 0 : 1);
  }
  driver->after_fork_in_parent();
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

// The symbol's next call fails, the caller hears of it by name, and a second try succeeds.
void each_call_fails_once() {
  auto driver = make();
  StreamHandle stream = 0;
  EventHandle event = 0;
  PhysicalHandle handle = 0;
  void *ptr = nullptr, *range = nullptr;
  MemoryInfo info;
  char host[16] = {};
  struct Case {
    const char* symbol;
    std::function<Status()> call;
  };
  const std::vector<Case> cases = {
      {"cuMemAlloc_v2", [&] { return driver->memory_allocate(0, 100, &ptr); }},
      {"cuMemGetInfo_v2", [&] { return driver->memory_info(0, &info); }},
      {"cuMemAddressReserve", [&] { return driver->address_reserve(0, 4 * kPage, &range); }},
      {"cuMemCreate", [&] { return driver->physical_create(0, kPage, &handle); }},
      {"cuMemMap", [&] { return driver->memory_map(0, range, handle); }},
      {"cuMemUnmap", [&] { return driver->memory_unmap(0, range, handle); }},
      {"cuMemSetAccess", [&] { return driver->memory_map(0, range, handle); }},
      {"cuMemUnmap", [&] { return driver->memory_unmap(0, range, handle); }},
      {"cuMemRelease", [&] { return driver->physical_release(0, handle); }},
      {"cuMemAddressFree", [&] { return driver->address_free(0, range, 4 * kPage); }},
      {"cuStreamCreateWithPriority", [&] { return driver->stream_create(0, 0, &stream); }},
      {"cuMemcpyAsync", [&] { return driver->copy_async(0, stream, ptr, host, 16); }},
      {"cuLaunchHostFunc", [&] { return driver->stream_enqueue(0, stream, "task", [] {}); }},
      {"cuMemHostRegister_v2", [&] { return driver->host_register(host, 16); }},
      {"cuMemHostUnregister", [&] { return driver->host_unregister(host); }},
      {"cuEventCreate", [&] { return driver->event_create(0, &event); }},
      {"cuEventRecord", [&] { return driver->event_record(0, event, stream); }},
      {"cuEventSynchronize", [&] { return driver->event_synchronize(0, event); }},
      {"cuEventQuery", [&] { return driver->event_query(0, event); }},
      {"cuStreamWaitEvent", [&] { return driver->stream_wait_event(0, stream, event); }},
      {"cuStreamQuery", [&] { return driver->stream_query(0, stream); }},
      {"cuStreamSynchronize", [&] { return driver->stream_synchronize(0, stream); }},
      {"cuCtxSynchronize", [&] { return driver->device_synchronize(0); }},
      {"cuCtxGetCurrent", [&] { return driver->memory_info(0, &info); }},
      {"cuCtxPushCurrent_v2", [&] { return driver->memory_info(1, &info); }},
      {"cuMemFree_v2", [&] { return driver->memory_free(0, ptr); }},
  };
  for (const Case& c : cases) {
    standin_fail(c.symbol, 1, 719);
    const Status status = c.call();
    if (status.code() != StatusCode::kFailed || status.message().find(c.symbol) == std::string::npos ||
        status.message().find("error 719") == std::string::npos) {
      std::fprintf(stderr, "%s: said '%s'\n", c.symbol, status.message().c_str());
      std::exit(1);
    }
    const Status again = c.call();
    if (!again.ok()) std::fprintf(stderr, "%s: the second call said '%s'\n", c.symbol, again.message().c_str());
    CHECK(again.ok());
  }
  standin_fail("cuMemAlloc_v2", 1, 2);
  CHECK(driver->memory_allocate(0, 100, &ptr).code() == StatusCode::kOutOfMemory);
  driver->event_destroy(0, event);
  CHECK(standin_used_bytes(0) == 0 && standin_live_events() == 0);
}

// A capture forbids memory calls, unless they are made in relaxed mode.
void captures() {
  auto driver = make();
  void* ptr = nullptr;
  standin_set_capturing(1);
  CHECK(driver->memory_allocate(0, 100, &ptr).ok() && driver->memory_free(0, ptr).ok());
  standin_set_capturing(0);
}

// What a capture frees while another stream uses it is free again once the graph orders that use
// before; without the setting, when the capture has ended.
void reuse_in_captures() {
  auto driver = make();
  const StreamHandle main = 0x100, side = 0x200, other = 0x300;
  CaptureMarker marker = 0, second = 0;
  std::vector<bool> passed;
  CHECK(driver->capture_mark(0, main, &marker).code() == StatusCode::kNotReady);
  CHECK(driver->capture_passed(0, main, {1}, &passed).code() == StatusCode::kNotReady);
  EventHandle event = 0;
  CHECK(driver->event_create(0, &event).ok());
  const auto order = [&](StreamHandle earlier, StreamHandle later) {
    CHECK(driver->event_record(0, event, earlier).ok() && driver->stream_wait_event(0, later, event).ok());
  };
  standin_begin_capture(as_stream(main));
  standin_launch(as_stream(main));
  order(main, side);
  CHECK(driver->capture_mark(0, side, &marker).ok() && driver->capture_mark(0, main, &second).ok());
  CHECK(driver->capture_passed(0, main, {marker, second, marker}, &passed).ok() && passed == std::vector<bool>({false, true, false}));
  for (const char* symbol : {"cuStreamGetCaptureInfo_v2", "cuGraphNodeGetDependencies"}) {
    standin_fail(symbol, 1, 719);
    CHECK(driver->capture_passed(0, main, {marker}, &passed).message().find(symbol) != std::string::npos);
  }
  standin_launch(as_stream(side));
  order(side, main);
  CHECK(driver->capture_passed(0, main, {marker, second}, &passed).ok() && passed == std::vector<bool>({true, true}));
  CHECK(driver->capture_passed(0, side, {marker, second}, &passed).ok() && passed == std::vector<bool>({true, false}));
  standin_end_captures();

  for (const bool reuse : {true, false}) {
    for (const char* fails : {"", "cuGraphAddEmptyNode", "cuStreamUpdateCaptureDependencies"}) {
      Settings settings;
      settings.graph_capture_record_stream_reuse = reuse;
      caching::CachingAllocator allocator(driver.get(), 0, settings);
      CHECK(allocator.begin_allocate_to_pool({1, 0}, [](StreamHandle) { return true; }).ok());
      standin_begin_capture(as_stream(main));
      order(main, side);
      void* a = allocator.allocate(100'000, main, nullptr);
      void* b = allocator.allocate(200'000, main, nullptr);
      allocator.record_stream(a, side);
      allocator.record_stream(b, side);
      allocator.record_stream(b, other);  // which is not captured
      standin_launch(as_stream(side));
      if (*fails != '\0') standin_fail(fails, 1, 719);
      CHECK(allocator.free(a) == caching::FreeResult::kFreed && allocator.free(b) == caching::FreeResult::kFreed);
      standin_fail("cuGraphAddEmptyNode", 0, 0);
      standin_fail("cuStreamUpdateCaptureDependencies", 0, 0);
      void* c = allocator.allocate(100'000, main, nullptr);
      CHECK(c != a && allocator.check_invariants().empty());  // the side stream may still use it
      order(side, main);
      void* d = allocator.allocate(100'000, main, nullptr);
      CHECK((d == a) == (reuse && *fails == '\0') && allocator.check_invariants().empty());
      void* e = allocator.allocate(200'000, main, nullptr);
      CHECK(e != b);
      standin_end_captures();
      CHECK(allocator.end_allocate_to_pool({1, 0}).ok());
      for (void* ptr : {c, d, e}) CHECK(allocator.free(ptr) == caching::FreeResult::kFreed);
      CHECK(allocator.free(allocator.allocate(1, main, nullptr)) == caching::FreeResult::kFreed);  // records the events
      standin_advance(as_stream(side));
      standin_advance(as_stream(other));
      CHECK(allocator.free(allocator.allocate(1, main, nullptr)) == caching::FreeResult::kFreed);
      CHECK(allocator.stats().active_bytes[0].current == 0 && allocator.check_invariants().empty());
    }
  }
  driver->event_destroy(0, event);
  CHECK(standin_live_events() == 0);
}

void gone() {
  auto driver = make();
  caching::CachingAllocator allocator(driver.get(), 0, Settings());
  void* a = allocator.allocate(1000, 0, nullptr);
  allocator.record_stream(a, 0x500);
  standin_set_gone(1);
  CHECK(allocator.free(a) == caching::FreeResult::kFreed);
  std::unique_ptr<caching::OomReport> report;
  CHECK(allocator.allocate(100 * kMiB, 0, &report) == nullptr && report->driver_failed);
  CHECK(report->driver_message.find("CUDA_ERROR_DEINITIALIZED") != std::string::npos);
  allocator.empty_cache();
  CHECK(allocator.check_invariants().empty());
}

// The allocator on this driver, with any call failing at any time: counters stay exact.
void random_operations() {
  static const char* const kSymbols[] = {"cuMemAlloc_v2",  "cuMemFree_v2", "cuMemCreate",         "cuMemMap",
                                         "cuMemSetAccess", "cuMemUnmap",   "cuMemRelease",        "cuEventCreate",
                                         "cuEventRecord",  "cuEventQuery", "cuStreamSynchronize", "cuCtxGetCurrent"};
  std::mt19937_64 random(1);
  for (const char* conf : {"", "expandable_segments:True", "max_split_size_mb:32"}) {
    auto driver = make();
    Settings settings;
    CHECK(parse_settings(conf, &settings).ok());
    {
      caching::CachingAllocator allocator(driver.get(), 0, settings);
      std::vector<void*> live;
      for (int i = 0; i < 4000; ++i) {
        const std::uint64_t what = random() % 100;
        if (what < 5) {
          standin_fail(kSymbols[random() % std::size(kSymbols)], static_cast<std::int64_t>(random() % 3 + 1), random() % 2 == 0 ? 2 : 719);
        } else if (what < 50) {
          const std::size_t bytes = std::size_t{1} << (random() % 26);
          if (void* ptr = allocator.allocate(bytes, random() % 3 * 0x100, nullptr)) live.push_back(ptr);
        } else if (what < 90 && !live.empty()) {
          std::swap(live[random() % live.size()], live.back());
          CHECK(allocator.free(live.back()) == caching::FreeResult::kFreed);
          live.pop_back();
        } else if (what < 95 && !live.empty()) {
          allocator.record_stream(live[random() % live.size()], random() % 3 * 0x100);
        } else if (what < 97) {
          allocator.empty_cache();
        } else {
          standin_advance(as_stream(random() % 3 * 0x100));
        }
        const std::string wrong = allocator.check_invariants();
        if (!wrong.empty()) std::fprintf(stderr, "%s, step %d: %s\n", conf, i, wrong.c_str());
        CHECK(wrong.empty());
      }
      for (const char* symbol : kSymbols) standin_fail(symbol, 0, 0);
      for (void* ptr : live) CHECK(allocator.free(ptr) == caching::FreeResult::kFreed);
      allocator.empty_cache();
      allocator.empty_cache();
      CHECK(allocator.stats().reserved_bytes[0].current == 0 && allocator.stats().active_bytes[0].current == 0);
      if (standin_used_bytes(0) != 0) std::fprintf(stderr, "%s: %zu bytes are lost\n", conf, standin_used_bytes(0));
    }
    CHECK(standin_used_bytes(0) == 0 && standin_live_events() == 0);
  }
}

// Mapped memory for another process (here this one again) and for another device; each call fails once.
void sharing() {
  auto driver = make();
  const auto count_files = [] {
    int count = 0;
    for (int fd = 0; fd < 256; ++fd) count += fcntl(fd, F_GETFD) != -1;
    return count;
  };
  const int files = count_files();
  void* range = nullptr;
  PhysicalHandle pages[3];
  CHECK(driver->address_reserve(0, 4 * kPage, &range).ok());
  auto* start = static_cast<char*>(range);
  for (int i = 0; i < 3; ++i) {
    CHECK(driver->physical_create(0, kPage, &pages[i]).ok() && driver->memory_map(0, start + i * kPage, pages[i]).ok());
  }
  std::vector<CudaDriver::SharedPage> shared;
  std::size_t page_bytes = 0;
  const std::pair<char*, std::size_t> wrong[] = {{start, 4 * kPage}, {start + 1, kPage}, {start, kPage + 1}, {start, 0}};
  for (auto [ptr, bytes] : wrong) {
    CHECK(driver->export_mapped(0, ptr, bytes, &shared, &page_bytes).code() == StatusCode::kInvalidArgument);
  }
  CHECK(driver->export_mapped(1, start, kPage, &shared, &page_bytes).code() == StatusCode::kInvalidArgument);
  standin_fail("cuMemExportToShareableHandle", 2, 719);
  CHECK(driver->export_mapped(0, start, 3 * kPage, &shared, &page_bytes).message().find("cuMemExportToShareableHandle") !=
        std::string::npos);
  CHECK(driver->export_mapped(0, start, 3 * kPage, &shared, &page_bytes).ok() && shared.size() == 3 && page_bytes == kPage);
  const auto again = shared;
  CHECK(driver->export_mapped(0, start, 3 * kPage, &shared, &page_bytes).ok() && shared[2].fd == again[2].fd);

  std::vector<int> fds;
  for (const auto& page : shared) fds.push_back(page.fd);
  void* opened = nullptr;
  const std::size_t used = standin_used_bytes(1);
  for (const char* symbol : {"cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"}) {
    const int before = count_files();
    for (int nth : {1, 3}) {
      if (nth == 3 && std::string(symbol) == "cuMemAddressReserve") continue;
      standin_fail(symbol, nth, 719);
      CHECK(driver->import_mapped(1, fds, page_bytes, &opened).message().find(symbol) != std::string::npos);
      CHECK(count_files() == before);
    }
  }
  CHECK(driver->import_mapped(1, fds, page_bytes, &opened).ok() && standin_used_bytes(1) == used);
  start[2 * kPage + 5] = 'x';
  CHECK(static_cast<char*>(opened)[2 * kPage + 5] == 'x' && driver->device_of(opened) == 1);
  CHECK(driver->unmap_imported(0, opened).code() == StatusCode::kInvalidArgument);
  CHECK(driver->unmap_imported(1, opened).ok() && driver->unmap_imported(1, opened).code() == StatusCode::kInvalidArgument);

  standin_fail("cuMemSetAccess", 2, 719);
  CHECK(!driver->allow_access(0, 1).ok() && driver->allow_access(0, 1).ok() && driver->allow_access(0, 1).ok());
  CHECK(driver->allow_access(0, 0).ok() && driver->allow_access(0, 7).code() == StatusCode::kInvalidArgument);
  for (int i = 0; i < 3; ++i) {
    CHECK(standin_accessor_count(start + i * kPage) == 2);
    CHECK(driver->memory_unmap(0, start + i * kPage, pages[i]).ok());
  }
  CHECK(driver->memory_map(0, start, pages[0]).ok() && standin_accessor_count(start) == 2);  // from the start
  CHECK(driver->memory_unmap(0, start, pages[0]).ok());
  for (PhysicalHandle page : pages) CHECK(driver->physical_release(0, page).ok());
  CHECK(driver->address_free(0, range, 4 * kPage).ok() && standin_used_bytes(0) == 0 && count_files() == files);
}

// The pinned cache has the driver lock its blocks: those that are there, and those to come.
void pinned() {
  auto driver = make();
  const auto counted = [](std::int64_t registered, std::int64_t unregistered) {
    return standin_calls("cuMemHostRegister_v2") == registered && standin_calls("cuMemHostUnregister") == unregistered;
  };
  {
    PinnedCache cache;
    void* before = cache.allocate(100'000);
    void* kept = cache.allocate(5'000);
    CHECK(cache.free(kept));  // cached
    CHECK(counted(0, 0));
    cache.set_registrar(driver.get());
    CHECK(counted(2, 0) && cache.stats().unlocked_bytes == 0);
    cache.set_registrar(driver.get());
    CHECK(cache.allocate(5'000) == kept && counted(2, 0));
    standin_fail("cuMemHostRegister_v2", 1, 719);  // then the system locks it, if it can
    void* refused = cache.allocate(1'000'000);
    CHECK(refused != nullptr && counted(3, 0));
    void* later = cache.allocate(2'000'000);
    CHECK(counted(4, 0));
    CHECK(cache.record_use(later, driver.get(), 0, 0));
    for (void* ptr : {before, kept, refused, later}) CHECK(cache.free(ptr));
    standin_advance(nullptr);
    cache.empty_cache();
    CHECK(counted(4, 3) && cache.stats().reserved_bytes.current == 0);
    PinnedSettings settings;
    settings.reserve_segment_bytes = 8 << 20;
    cache.apply_settings(settings);
    void* cut = cache.allocate(100);
    CHECK(counted(5, 3) && cache.allocate(200) != nullptr && counted(5, 3));  // the segment, once
    CHECK(cache.free(cut));
  }
  CHECK(standin_live_events() == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> parts = {{"calls", calls},
                                                              {"each_call_fails_once", each_call_fails_once},
                                                              {"captures", captures},
                                                              {"gone", gone},
                                                              {"reuse_in_captures", reuse_in_captures},
                                                              {"pinned", pinned},
                                                              {"sharing", sharing},
                                                              {"random", random_operations}};
  const auto part = parts.find(argc > 1 ? argv[1] : "");
  if (part == parts.end()) {
    std::fprintf(stderr, "usage: cuda_driver_test calls|each_call_fails_once|captures|reuse_in_captures|gone|pinned|sharing|random\n");
    return 2;
  }
  part->second();
  std::puts("ok");
}
