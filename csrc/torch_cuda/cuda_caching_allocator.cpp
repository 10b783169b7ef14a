#include "torch_cuda/cuda_caching_allocator.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Logging.h>
#include <cuda_runtime_api.h>
#include <sys/syscall.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "base/clock.h"
#include "capi/runtime.h"
#include "driver/cuda/cuda_driver.h"

namespace mybackend::torch_cuda {
namespace {

namespace cca = c10::cuda::CUDACachingAllocator;
namespace cda = c10::CachingDeviceAllocator;
using caching::CachingAllocator;

constexpr const char* kName = "mybackend";

StreamHandle handle(cudaStream_t stream) {
  return reinterpret_cast<std::uintptr_t>(stream);
}
cudaStream_t stream_of(StreamHandle stream) {
  return reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(stream));
}
caching::PoolId pool_id(c10::MempoolId_t id) {
  return {id.first, id.second};
}

void check(const Status& status) {
  if (status.ok()) return;
  if (status.code() == StatusCode::kOutOfMemory) TORCH_CHECK_WITH(OutOfMemoryError, false, status.message());
  if (status.code() == StatusCode::kInvalidArgument) TORCH_CHECK_VALUE(false, status.message());
  TORCH_CHECK(false, status.message());
}

DeviceMemory& memory() {
  Status status;
  DeviceMemory* memory = Runtime::get().cuda_memory(&status);
  check(status);
  return *memory;
}

CachingAllocator& caching_of(c10::DeviceIndex device) {
  DeviceMemory& m = memory();
  TORCH_CHECK(device >= 0 && device < m.device_count(), "Invalid device argument ", static_cast<int>(device), ": did you call init?");
  return m.caching(device);
}

void free_pointer(void* ptr) {
  if (ptr == nullptr) return;
  DeviceMemory* m = Runtime::get().cuda_memory_if_started();
  const int device = m->device_of(ptr);
  const std::size_t bytes = c10::memoryProfilingEnabled() && device >= 0 ? m->caching(device).base_allocation(ptr).second : 0;
  if (!m->free(ptr, device)) {
    TORCH_WARN("mybackend: free of a pointer that is not allocated: ", ptr);
    return;
  }
  if (bytes > 0) {
    const caching::DeviceStats stats = m->caching(device).stats();
    c10::reportMemoryUsageToProfiler(ptr, -static_cast<std::int64_t>(bytes), static_cast<std::size_t>(stats.allocated_bytes[0].current),
                                     static_cast<std::size_t>(stats.reserved_bytes[0].current),
                                     c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)));
  }
}

std::shared_ptr<c10::GatheredContext> to_context(const caching::Context& context) {
  return std::static_pointer_cast<c10::GatheredContext>(context);
}

cda::TraceEntry to_entry(int device, const caching::TraceEntry& e) {
  cda::TraceEntry entry(static_cast<cda::TraceEntry::Action>(e.action), static_cast<c10::DeviceIndex>(device), e.address, e.bytes,
                        stream_of(e.stream), {e.pool_id.first, e.pool_id.second}, c10::approx_time_t{}, to_context(e.context),
                        e.tags != nullptr ? e.tags->compile_context : "", e.tags != nullptr ? e.tags->user_metadata : "");
  if (e.action == caching::Action::kAnnotate && e.note != nullptr) entry.user_metadata_ = *e.note;
  entry.time_.t_ = static_cast<time_t>(e.time_us);
  return entry;
}
// The two enumerations name the same actions in the same order.
static_assert(static_cast<int>(caching::Action::kOom) == cda::TraceEntry::OOM);
static_assert(static_cast<int>(caching::Action::kAnnotate) == cda::TraceEntry::ANNOTATE);

// torch's recorder is a plain function, and so is ours: what it is stands here.
std::atomic<cca::CreateContextFn> g_recorder{nullptr};
caching::Context capture_context() {
  const cca::CreateContextFn recorder = g_recorder.load();
  return recorder != nullptr ? std::static_pointer_cast<void>(recorder()) : caching::Context();
}

// Changes one of the thread's tags, which the history shares.
template <typename Change>
void change_tags(Change change) {
  const auto old = caching::history_tags();
  auto tags = old != nullptr ? std::make_shared<caching::HistoryTags>(*old) : std::make_shared<caching::HistoryTags>();
  change(*tags);
  caching::set_history_tags(tags->compile_context.empty() && tags->user_metadata.empty() ? nullptr : tags);
}
thread_local std::vector<std::string> t_compile_contexts;

struct Checkpoint final : cca::AllocatorState {
  caching::PoolCheckpoint pool;
};

// Memory of other processes, by its handle: opened once, closed when nobody uses it.
struct IpcCache {
  std::mutex mutex;
  std::unordered_map<std::string, std::weak_ptr<void>> opened;
};
IpcCache& ipc_cache() {
  static auto* cache = new IpcCache;
  return *cache;
}
constexpr char kIpcMark[] = "mybackend:cuda:1:";
// Of mapped pages, one descriptor each: this, IpcPages, and as many SharedPage.
constexpr char kIpcPagesMark[] = "mybackend:cuda:pages:1:";
struct IpcPages {
  pid_t process;
  std::size_t page_bytes;
  std::size_t count;
};

CudaDriver& cuda_driver() {
  return static_cast<CudaDriver&>(memory().driver());
}

// What the other process has under `theirs`, in this one.
int take_descriptor(int process, pid_t pid, int theirs) {
  const auto fd = static_cast<int>(syscall(SYS_pidfd_getfd, process, theirs, 0));
  TORCH_CHECK(fd >= 0, "mybackend: cannot take the memory that process ", pid, " shares (pidfd_getfd: ", std::strerror(errno),
              "): it must still run, and this process must be allowed to trace it (kernel.yama.ptrace_scope=0, or PR_SET_PTRACER there)");
  return fd;
}

std::shared_ptr<void> open_pages(const std::string& text) {
  constexpr std::size_t mark_bytes = sizeof kIpcPagesMark - 1;
  IpcPages header{};
  TORCH_CHECK_VALUE(text.size() >= mark_bytes + sizeof header, "mybackend: a broken handle of shared memory");
  std::memcpy(&header, text.data() + mark_bytes, sizeof header);
  TORCH_CHECK_VALUE((text.size() - mark_bytes - sizeof header) / sizeof(CudaDriver::SharedPage) == header.count,
                    "mybackend: a broken handle of shared memory");
  struct Descriptors : std::vector<int> {
    ~Descriptors() {
      for (int fd : *this) close(fd);
    }
  } descriptors, process;
  process.push_back(static_cast<int>(syscall(SYS_pidfd_open, header.process, 0)));
  TORCH_CHECK(process[0] >= 0, "mybackend: process ", header.process,
              ", whose memory is shared, cannot be opened (pidfd_open: ", std::strerror(errno), ")");
  for (std::size_t i = 0; i < header.count; ++i) {
    CudaDriver::SharedPage page;
    std::memcpy(&page, text.data() + mark_bytes + sizeof header + i * sizeof page, sizeof page);
    descriptors.push_back(take_descriptor(process[0], header.process, page.fd));
  }
  const c10::DeviceIndex device = c10::cuda::current_device();
  void* ptr = nullptr;
  check(cuda_driver().import_mapped(device, descriptors, header.page_bytes, &ptr));
  return {ptr, [device](void* p) {
            if (const Status status = cuda_driver().unmap_imported(device, p); !status.ok()) TORCH_WARN("mybackend: ", status.message());
          }};
}

std::shared_ptr<void> open_allocation(const std::string& text) {
  constexpr std::size_t mark_bytes = sizeof kIpcMark - 1;
  TORCH_CHECK_VALUE(text.compare(0, mark_bytes, kIpcMark) == 0 && text.size() == mark_bytes + sizeof(cudaIpcMemHandle_t),
                    "mybackend: the memory was shared by a process without mybackend.cuda.install()");
  cudaIpcMemHandle_t ipc;
  std::memcpy(&ipc, text.data() + mark_bytes, sizeof ipc);
  void* ptr = nullptr;
  const c10::DeviceIndex device = c10::cuda::current_device();
  C10_CUDA_CHECK(cudaIpcOpenMemHandle(&ptr, ipc, cudaIpcMemLazyEnablePeerAccess));
  return {ptr, [device](void* p) {
            const c10::cuda::CUDAGuard guard(device);
            (void)cudaIpcCloseMemHandle(p);
          }};
}

class Allocator final : public cca::CUDAAllocator {
 public:
  // --- Allocation ---
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::DeviceIndex device = c10::cuda::current_device();
    void* ptr = allocate_on(device, nbytes, c10::cuda::getCurrentCUDAStream(device).stream());
    return {ptr, ptr, &free_pointer, c10::Device(c10::DeviceType::CUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pointer; }
  void copy_data(void* dst, const void* src, std::size_t nbytes) const override {
    C10_CUDA_CHECK(cudaMemcpy(dst, src, nbytes, cudaMemcpyDeviceToDevice));
  }
  void* raw_alloc(std::size_t nbytes) override {
    const c10::DeviceIndex device = c10::cuda::current_device();
    return allocate_on(device, nbytes, c10::cuda::getCurrentCUDAStream(device).stream());
  }
  void* raw_alloc_with_stream(std::size_t nbytes, cudaStream_t stream) override {
    return allocate_on(c10::cuda::current_device(), nbytes, stream);
  }
  void raw_delete(void* ptr) override { free_pointer(ptr); }

  void init(int device_count) override {
    TORCH_CHECK(memory().device_count() >= device_count, "mybackend: the driver has ", memory().device_count(), " devices, torch.cuda ",
                device_count);
    initialized_.store(true);
  }
  bool initialized() override { return initialized_.load(); }
  void enable(bool value) override { memory().set_caching_enabled(value); }
  bool isEnabled() const override { return memory().caching_enabled(); }
  std::string name() override { return kName; }

  double getMemoryFraction(c10::DeviceIndex device) override { return caching_of(device).memory_fraction(); }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override { check(caching_of(device).set_memory_fraction(fraction)); }
  void emptyCache(c10::MempoolId_t id) override {
    for (int device = 0; device < memory().device_count(); ++device) memory().caching(device).empty_cache(pool_id(id));
  }
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest) override {
    if (*largest == 0) {
      MemoryInfo info;
      check(memory().driver().memory_info(device, &info));
      *largest = info.free_bytes;
    }
    *largest = std::max(*largest, caching_of(device).largest_free_block_bytes());
  }
  void* getBaseAllocation(void* ptr, std::size_t* size) override {
    const int device = memory().device_of(ptr);
    TORCH_CHECK_VALUE(device >= 0, "invalid device pointer: ", ptr);
    const auto [base, bytes] = memory().caching(device).driver_allocation(ptr);
    TORCH_CHECK_VALUE(base != nullptr, "invalid device pointer: ", ptr);
    if (size != nullptr) *size = bytes;
    return base;
  }
  void recordStream(const c10::DataPtr& ptr, c10::cuda::CUDAStream stream) override {
    // Of another deleter: another process's memory (IPC), or somebody else's; nothing to defer.
    if (ptr.get() == nullptr || ptr.get_deleter() != &free_pointer) return;
    memory().record_stream(ptr.get(), handle(stream.stream()));
  }
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override {
    std::vector<cca::StreamSegmentSize> sizes;
    for (const auto& s : caching_of(device).expandable_sizes()) sizes.emplace_back(stream_of(s.stream), s.is_small, s.mapped_bytes);
    return sizes;
  }

  // --- Statistics ---
  cda::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    CachingAllocator& allocator = caching_of(device);
    cda::DeviceStats to;
    caching::copy_stats(allocator.stats(), &to);
    for (const auto& [id, stats] : allocator.private_pool_reserved_bytes()) {
      auto& by_pool = to.reserved_bytes_by_private_pools[{id.first, id.second}];
      for (std::size_t i = 0; i < stats.size(); ++i) caching::copy_stat(stats[i], &by_pool[i]);
    }
    return to;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { caching_of(device).reset_accumulated_stats(); }
  void resetPeakStats(c10::DeviceIndex device) override { caching_of(device).reset_peak_stats(); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    MemoryInfo info;
    check(memory().driver().memory_info(device, &info));
    return {info.free_bytes, info.total_bytes};
  }

  // --- History ---
  void recordHistory(bool enabled, cca::CreateContextFn recorder, std::size_t max_entries, cca::RecordContext when, bool clear,
                     const std::vector<std::string>& skip_actions) override {
    if (!enabled) {
      memory().stop_history();
      return;
    }
    caching::HistoryOptions options;
    options.max_entries = max_entries;
    options.when = static_cast<caching::RecordContext>(when);
    options.capture = recorder != nullptr ? &capture_context : nullptr;
    for (const std::string& name : skip_actions) options.skipped |= 1u << static_cast<int>(cda::parseTraceEntryAction(name));
    g_recorder.store(recorder);
    memory().start_history(options, clear);
    if (clear) {
      std::lock_guard lock(annotations_mutex_);
      annotations_.clear();
    }
  }
  bool isHistoryEnabled() override { return caching_of(0).history_enabled(); }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* ptr) override {
    const int device = memory().device_of(ptr);
    return device >= 0 ? to_context(memory().caching(device).context_of(ptr)) : nullptr;
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override {
    cda::AnnotationEntry entry(c10::cuda::current_device(), c10::approx_time_t{});
    entry.time_.t_ = static_cast<time_t>(wall_now_us());
    for (const auto& [key, value] : metadata) entry.recordUserMetadata(key, value);
    std::lock_guard lock(annotations_mutex_);
    annotations_.push_back(std::move(entry));
  }
  void pushCompileContext(std::string& context) override {
    t_compile_contexts.push_back(context);
    change_tags([&](auto& tags) { tags.compile_context = context; });
  }
  void popCompileContext() override {
    if (t_compile_contexts.empty()) return;
    t_compile_contexts.pop_back();
    change_tags([](auto& tags) { tags.compile_context = t_compile_contexts.empty() ? "" : t_compile_contexts.back(); });
  }
  bool supportsUserMetadata() override { return true; }
  void setUserMetadata(const std::string& metadata) override {
    change_tags([&](auto& tags) { tags.user_metadata = metadata; });
  }
  std::string getUserMetadata() override {
    const auto tags = caching::history_tags();
    return tags != nullptr ? tags->user_metadata : "";
  }
  void annotateMemory(const void* ptr, const std::string& metadata) override {
    const int device = memory().device_of(ptr);
    if (device >= 0) memory().caching(device).annotate(ptr, metadata);
  }
  cca::SnapshotInfo snapshot(c10::MempoolId_t only, bool include_traces) override {
    cca::SnapshotInfo info;
    for (int device = 0; device < memory().device_count(); ++device) {
      CachingAllocator& allocator = memory().caching(device);
      auto& traces = info.device_traces.emplace_back();
      // First the history: the event of this snapshot belongs to the next one's.
      if (include_traces) {
        for (const caching::TraceEntry& entry : allocator.history()) {
          if (!caching::is_own_action(entry.action)) traces.push_back(to_entry(device, entry));
        }
      }
      for (const caching::SegmentInfo& from : allocator.snapshot(include_traces)) {
        if (only != c10::MempoolId_t{0, 0} && pool_id(only) != from.pool_id) continue;
        cda::SegmentInfo to;
        to.device = static_cast<c10::DeviceIndex>(device);
        to.address = from.address;
        to.total_size = from.total_bytes;
        to.requested_size = from.requested_bytes;
        to.allocated_size = from.allocated_bytes;
        to.active_size = from.active_bytes;
        to.stream = stream_of(from.stream);
        to.is_large = from.is_large;
        to.is_expandable = from.is_expandable;
        to.owner_private_pool_id = {from.pool_id.first, from.pool_id.second};
        to.context_when_allocated = to_context(from.context);
        for (const caching::BlockInfo& block : from.blocks) {
          to.blocks.push_back({block.bytes, block.requested_bytes, static_cast<std::int32_t>(block.age), block.allocated, block.active,
                               to_context(block.context)});
        }
        info.segments.push_back(std::move(to));
      }
    }
    {
      std::lock_guard lock(annotations_mutex_);
      info.external_annotations = annotations_;
    }
    const Settings s = Runtime::get().config().settings();
    cca::AllocatorConfigInfo& config = info.config_metadata;
    config.garbage_collection_threshold = s.garbage_collection_threshold;
    config.max_split_size = s.max_split_size_mb;
    config.pinned_num_register_threads = static_cast<std::size_t>(s.pinned_num_register_threads);
    config.expandable_segments = s.expandable_segments;
    config.release_lock_on_malloc = s.release_lock_on_cudamalloc;
    config.pinned_use_host_register = s.pinned_use_cuda_host_register;
    config.graph_capture_record_stream_reuse = s.graph_capture_record_stream_reuse;
    const char* variable = config_variable_in_force();
    config.last_allocator_settings = variable != nullptr ? std::getenv(variable) : "";
    config.roundup_power2_divisions.assign(s.roundup_power2_divisions.begin(), s.roundup_power2_divisions.end());
    config.max_round_threshold = s.pinned_max_round_threshold_mb;
    config.max_cached_size = s.pinned_max_cached_size_mb;
    return info;
  }
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) override {
    for (int device = 0; device < memory().device_count(); ++device) {
      memory().caching(device).on_oom([observer](const caching::OomReport& r) {
        observer(r.device, r.rounded_bytes, r.limit_bytes != kUnlimitedBytes ? r.limit_bytes : r.total_bytes, r.free_bytes);
      });
    }
  }
  void attachOomRejectionObserver(cca::OomRejectionObserver observer) override {
    for (int device = 0; device < memory().device_count(); ++device) {
      memory().caching(device).on_rejection(
          [observer](const caching::OomReport& r) { observer(r.device, r.rounded_bytes, r.allocated_bytes, r.total_bytes); });
    }
  }
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override {
    for (int device = 0; device < memory().device_count(); ++device) {
      memory().caching(device).on_trace([tracker, device](const caching::TraceEntry& entry) {
        if (!caching::is_own_action(entry.action)) tracker(to_entry(device, entry));
      });
    }
  }

  // --- Pools and graphs ---
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id, std::function<bool(cudaStream_t)> filter) override {
    check(caching_of(device).begin_allocate_to_pool(
        pool_id(id), [filter = std::move(filter)](StreamHandle stream) { return filter(stream_of(stream)); }));
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id) override {
    check(caching_of(device).end_allocate_to_pool(pool_id(id)));
  }
  void markCaptureBegin(c10::DeviceIndex device) override { caching_of(device).begin_capture(); }
  void markCaptureEnd(c10::DeviceIndex device) override { caching_of(device).end_capture(); }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t id) override { check(caching_of(device).release_pool(pool_id(id))); }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t id) override {
    return static_cast<int>(caching_of(device).pool_use_count(pool_id(id)));
  }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t id, std::shared_ptr<cca::CUDAAllocator> allocator) override {
    std::shared_ptr<caching::SegmentSource> source;
    if (allocator != nullptr && allocator.get() != this) {
      source = std::make_shared<caching::SegmentSource>();
      source->allocate = [allocator](std::size_t bytes, StreamHandle) { return allocator->raw_alloc(bytes); };
      source->free = [allocator](void* ptr, std::size_t, StreamHandle) { allocator->raw_delete(ptr); };
    }
    caching_of(device).create_or_use_pool(pool_id(id), false, false, std::move(source));
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t id, bool use_on_oom) override {
    check(caching_of(device).set_use_on_oom(pool_id(id), use_on_oom));
  }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t id) override { check(caching_of(device).set_no_split(pool_id(id))); }
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t id, const std::unordered_set<void*>& expected) override {
    const std::vector<void*> live = caching_of(device).pool_live_allocations(pool_id(id));
    return live.size() == expected.size() && std::all_of(live.begin(), live.end(), [&](void* ptr) { return expected.count(ptr) != 0; });
  }
  std::shared_ptr<cca::AllocatorState> getCheckpointState(c10::DeviceIndex device, c10::MempoolId_t id) override {
    auto state = std::make_shared<Checkpoint>();
    check(caching_of(device).checkpoint_pool(pool_id(id), &state->pool));
    return state;
  }
  cca::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device, std::shared_ptr<cca::AllocatorState> state) override {
    const auto* checkpoint = dynamic_cast<const Checkpoint*>(state.get());
    TORCH_CHECK_VALUE(checkpoint != nullptr, "mybackend: the checkpoint was made by another allocator");
    cca::CheckpointDelta delta;
    std::vector<void*> allocated;
    check(caching_of(device).restore_pool(checkpoint->pool, &delta.ptrs_freed, &allocated));
    for (void* ptr : allocated) delta.dataptrs_allocd.emplace_back(ptr, ptr, &free_pointer, c10::Device(c10::DeviceType::CUDA, device));
    return delta;
  }

  // --- Other devices and processes ---
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override {
    const c10::cuda::CUDAGuard guard(device);
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      C10_CUDA_CHECK(error);
    }
    check(cuda_driver().allow_access(peer, device));  // mapped memory does not follow that
  }
  cudaError_t memcpyAsync(void* dst, int dst_device, const void* src, int src_device, std::size_t count, cudaStream_t stream,
                          bool p2p_enabled) override {
    const auto is_plain = [](int device) { return caching_of(static_cast<c10::DeviceIndex>(device)).expandable_sizes().empty(); };
    if (p2p_enabled || dst_device == src_device || (is_plain(dst_device) && is_plain(src_device))) {
      return cudaMemcpyAsync(dst, src, count, cudaMemcpyDeviceToDevice, stream);
    }
    return cudaMemcpyPeerAsync(dst, dst_device, src, src_device, count, stream);
  }
  cca::ShareableHandle shareIpcHandle(void* ptr) override {
    const int device = memory().device_of(ptr);
    TORCH_CHECK_VALUE(device >= 0, "invalid device pointer: ", ptr);
    bool is_expandable = false;
    const auto [base, bytes] = memory().caching(device).driver_allocation(ptr, &is_expandable);
    TORCH_CHECK_VALUE(base != nullptr, "invalid device pointer: ", ptr);
    const auto offset = static_cast<char*>(ptr) - static_cast<char*>(base);
    if (is_expandable) {
      IpcPages header{getpid(), 0, 0};
      std::vector<CudaDriver::SharedPage> pages;
      check(cuda_driver().export_mapped(device, base, bytes, &pages, &header.page_bytes));
      header.count = pages.size();
      std::string text = kIpcPagesMark;
      text.append(reinterpret_cast<const char*>(&header), sizeof header);
      text.append(reinterpret_cast<const char*>(pages.data()), pages.size() * sizeof pages[0]);
      return {offset, text};
    }
    cudaIpcMemHandle_t ipc;
    C10_CUDA_CHECK(cudaIpcGetMemHandle(&ipc, base));
    return {offset, kIpcMark + std::string(reinterpret_cast<const char*>(&ipc), sizeof ipc)};
  }
  std::shared_ptr<void> getIpcDevPtr(std::string text) override {
    IpcCache& cache = ipc_cache();
    std::lock_guard lock(cache.mutex);
    std::weak_ptr<void>& known = cache.opened[text];
    if (std::shared_ptr<void> open = known.lock()) return open;
    std::erase_if(cache.opened, [&](const auto& entry) { return entry.second.expired() && entry.first != text; });
    const bool is_pages = text.compare(0, sizeof kIpcPagesMark - 1, kIpcPagesMark) == 0;
    std::shared_ptr<void> open = is_pages ? open_pages(text) : open_allocation(text);
    cache.opened[text] = open;
    return open;
  }

 private:
  void* allocate_on(c10::DeviceIndex device, std::size_t nbytes, cudaStream_t stream) {
    if (nbytes == 0) return nullptr;
    DeviceMemory& m = memory();
    AllocationFailure failure;
    void* ptr = m.allocate(device, nbytes, handle(stream), &failure);
    if (C10_UNLIKELY(ptr == nullptr)) {
      if (c10::memoryProfilingEnabled()) {
        const caching::DeviceStats stats = m.caching(device).stats();
        c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(nbytes), static_cast<std::size_t>(stats.allocated_bytes[0].current),
                                         static_cast<std::size_t>(stats.reserved_bytes[0].current),
                                         c10::Device(c10::DeviceType::CUDA, device));
      }
      check({failure.code, std::move(failure.message)});
    }
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
      const caching::DeviceStats stats = m.caching(device).stats();
      const auto bytes = static_cast<std::int64_t>(m.caching(device).base_allocation(ptr).second);
      c10::reportMemoryUsageToProfiler(ptr, bytes, static_cast<std::size_t>(stats.allocated_bytes[0].current),
                                       static_cast<std::size_t>(stats.reserved_bytes[0].current),
                                       c10::Device(c10::DeviceType::CUDA, device));
    }
    return ptr;
  }

  std::atomic<bool> initialized_{false};
  std::mutex annotations_mutex_;
  std::vector<cda::AnnotationEntry> annotations_;
};

// Never destroyed: tensors may be freed by other libraries' exit handlers.
const std::shared_ptr<cca::CUDAAllocator>& instance() {
  static auto* held = new std::shared_ptr<cca::CUDAAllocator>(new Allocator);
  return *held;
}

}  // namespace

bool installed() {
  return cca::get() == instance().get();
}

std::uintptr_t allocator_address() {
  return reinterpret_cast<std::uintptr_t>(static_cast<c10::Allocator*>(instance().get()));
}

void install() {
  if (installed()) return;
  TORCH_CHECK(!cca::get()->initialized(),
              "mybackend.cuda.install: torch.cuda is already initialized, and its allocator cannot be changed any more; call it first");
  const Settings settings = Runtime::get().config().settings();
  TORCH_CHECK_VALUE(settings.backend == "caching", "mybackend.cuda.install: backend:", settings.backend,
                    " is host memory; torch.cuda needs backend:caching");
  DeviceMemory& m = memory();
  for (int device = 0; device < m.device_count(); ++device) {
    // What other parts of torch hold and can give back, above all memory of other processes.
    m.caching(device).on_memory_pressure([] {
      bool freed = false;
      for (const std::string& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
        freed = c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute() || freed;
      }
      return freed;
    });
  }
  torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(instance());
}

}  // namespace mybackend::torch_cuda
