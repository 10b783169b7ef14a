#include "torch/profiler.h"

#include <ctime>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

// torch builds have it; an extension has to say so to see the declarations.
#ifndef USE_KINETO
#define USE_KINETO
#endif
#if __has_include(<torch/csrc/profiler/standalone/privateuse1_profiler.h>)
#define FMT_HEADER_ONLY
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>
#define MYBACKEND_HAS_KINETO 1
#else
#define MYBACKEND_HAS_KINETO 0  // a torch that cannot be told of kernels
#endif

namespace mybackend::glue {
namespace {

struct KernelRecord {
  std::string name;
  KernelKind kind;
  c10::DeviceIndex device;
  StreamHandle stream;
  std::int64_t begin_ns;
  std::int64_t end_ns;
  std::uint64_t correlation;
};

struct Records {
  std::mutex mutex;
  std::vector<KernelRecord> list;
};

Records& records() {
  static auto* all = new Records;  // streams may record while the process ends
  return *all;
}

// The operators that the profiler opened on this thread, outermost first.
thread_local std::vector<std::uint64_t> t_correlations;

}  // namespace

std::int64_t profiler_now() noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

std::uint64_t profiler_correlation() noexcept {
  return t_correlations.empty() ? 0 : t_correlations.back();
}

void record_kernel(const char* name, KernelKind kind, c10::DeviceIndex device, StreamHandle stream, std::int64_t begin_ns,
                   std::int64_t end_ns, std::uint64_t correlation) noexcept {
  if (!g_profiling.load(std::memory_order_relaxed)) return;
  try {
    std::lock_guard lock(records().mutex);
    records().list.push_back({name, kind, device, stream, begin_ns, end_ns, correlation});
  } catch (...) {  // no memory for a record: a profile with a gap
  }
}

#if MYBACKEND_HAS_KINETO
namespace {

using libkineto::ActivityType;

class Session : public libkineto::IActivityProfilerSession {
 public:
  ~Session() override { g_profiling = false; }

  void start() override {
    {
      std::lock_guard lock(records().mutex);
      records().list.clear();
    }
    begin_ns_ = profiler_now();
    status_ = libkineto::TraceStatus::RECORDING;
    g_profiling = true;
  }

  void stop() override {
    // Copies that are still queued belong to the profile.
    if (DeviceMemory* memory = Runtime::get().memory_if_started()) {
      for (int device = 0; device < memory->device_count(); ++device) (void)memory->driver().device_synchronize(device);
    }
    g_profiling = false;
    end_ns_ = profiler_now();
    status_ = libkineto::TraceStatus::PROCESSING;
  }

  std::vector<std::string> errors() override { return {}; }

  void processTrace(libkineto::ActivityLogger& logger) override { process(logger, nullptr); }

  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, std::int64_t, std::int64_t) override {
    process(logger, linked);
  }

  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }

  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    std::vector<libkineto::ResourceInfo> found;
    for (const auto& [device, stream] : streams_) {
      const auto id = static_cast<std::int64_t>(stream);
      found.push_back({id, id, device, "stream " + std::to_string(id)});
    }
    return found;
  }

  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }

  void pushCorrelationId(std::uint64_t id) override { t_correlations.push_back(id); }
  void popCorrelationId() override {
    if (!t_correlations.empty()) t_correlations.pop_back();
  }

 private:
  void process(libkineto::ActivityLogger& logger, const libkineto::getLinkedActivityCallback& linked) {
    std::vector<KernelRecord> taken;
    {
      std::lock_guard lock(records().mutex);
      taken.swap(records().list);
    }
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span = libkineto::TraceSpan(begin_ns_, end_ns_, "mybackend");
    buffer_->gpuOpCount = static_cast<int>(taken.size());
    for (const KernelRecord& record : taken) {
      const ActivityType type = record.kind == KernelKind::kCopy ? ActivityType::GPU_MEMCPY : ActivityType::CONCURRENT_KERNEL;
      buffer_->emplace_activity(buffer_->span, type, record.name);
      libkineto::GenericTraceActivity& activity = *buffer_->activities.back();
      activity.startTime = record.begin_ns;
      activity.endTime = record.end_ns;
      activity.id = static_cast<std::int32_t>(record.correlation);
      activity.device = record.device;
      activity.resource = static_cast<std::int32_t>(record.stream);
      activity.flow.id = static_cast<std::uint32_t>(record.correlation);
      activity.flow.type = libkineto::kLinkAsyncCpuGpu;
      activity.flow.start = 0;
      if (linked && record.correlation != 0) activity.linked = linked(static_cast<std::int32_t>(record.correlation));
      activity.log(logger);
      streams_.emplace(record.device, record.stream);
    }
  }

  std::int64_t begin_ns_ = 0;
  std::int64_t end_ns_ = 0;
  std::set<std::pair<c10::DeviceIndex, StreamHandle>> streams_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

class DeviceProfiler : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override {
    static const std::string name = "mybackend";
    return name;
  }
  const std::set<ActivityType>& availableActivities() const override {
    static const std::set<ActivityType> types = {ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY};
    return types;
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(const std::set<ActivityType>& types, const libkineto::Config&) override {
    if (types.count(ActivityType::CONCURRENT_KERNEL) == 0) return nullptr;  // the CPU's activities alone
    return std::make_unique<Session>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(std::int64_t, std::int64_t, const std::set<ActivityType>& types,
                                                                 const libkineto::Config& config) override {
    return configure(types, config);
  }
};

using torch::profiler::impl::RegisterPrivateUse1Profiler;  // the macro's name for it
const RegisterPrivateUse1Profiler<DeviceProfiler> registered;

}  // namespace
#endif

}  // namespace mybackend::glue
