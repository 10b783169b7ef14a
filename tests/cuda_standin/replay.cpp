// Runs an allocation trace (docs: mybackend.replay) through whatever allocator torch.cuda has,
// by torch's own interface, and writes what it then says of itself as JSON: two allocators are
// compared by reading them in the same way. Called by ctypes in a process with torch.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <unordered_map>

namespace cca = c10::cuda::CUDACachingAllocator;
extern "C" void standin_advance(void* stream) __attribute__((weak));

namespace {

cudaStream_t stream_of(int number) {
  return reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(number) * 0x1000);
}

void write_stat(std::ostream& out, const c10::CachingAllocator::Stat& s) {
  out << '[' << s.current << ", " << s.peak << ", " << s.allocated << ", " << s.freed << ']';
}

}  // namespace

// The result as a string that lives until the next call; nullptr when the trace cannot be read.
extern "C" const char* replay_trace(const char* path) {
  static std::string text;
  std::ifstream in(path);
  if (!in) return nullptr;
  auto* allocator = cca::get();
  allocator->recordHistory(true, +[]() -> std::shared_ptr<c10::GatheredContext> { return nullptr; }, std::size_t{1} << 30,
                           cca::RecordContext::STATE, true, {});
  std::unordered_map<long, void*> live;
  std::string out_of_memory;
  const std::function<bool(cudaStream_t)> every_stream = [](cudaStream_t) { return true; };
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    char kind = 0;
    long id = 0;
    words >> kind;
    if (std::strchr("afrbnd", kind) != nullptr) words >> id;
    switch (kind) {
      case 'a': {
        std::size_t bytes = 0;
        int stream = 0;
        words >> bytes >> stream;
        try {
          if (void* ptr = allocator->raw_alloc_with_stream(bytes, stream_of(stream))) live[id] = ptr;
        } catch (const std::exception&) {
          out_of_memory += (out_of_memory.empty() ? "" : ", ") + std::to_string(id);
        }
        break;
      }
      case 'f':
        if (live.count(id) != 0) {
          allocator->raw_delete(live[id]);
          live.erase(id);
        }
        break;
      case 'r':
        if (live.count(id) != 0) {
          int stream = 0;
          words >> stream;
          c10::DataPtr data(live[id], live[id], allocator->raw_deleter(), c10::Device(c10::kCUDA, 0));
          allocator->recordStream(data, c10::cuda::getStreamFromExternal(stream_of(stream), 0));
          (void)data.release_context();
        }
        break;
      case 'q': {
        int stream = 0;
        words >> stream;
        standin_advance(stream_of(stream));
        break;
      }
      case 'e': allocator->emptyCache(); break;
      case 'p': allocator->resetPeakStats(0); break;
      case 'm': {
        double fraction = 1;
        words >> fraction;
        allocator->setMemoryFraction(fraction, 0);
        break;
      }
      case 'b': allocator->beginAllocateToPool(0, {0, static_cast<unsigned long long>(id)}, every_stream); break;
      case 'n': allocator->endAllocateToPool(0, {0, static_cast<unsigned long long>(id)}); break;
      case 'd': allocator->releasePool(0, {0, static_cast<unsigned long long>(id)}); break;
      default: return nullptr;
    }
  }
  std::ostringstream out;
  const auto s = allocator->getDeviceStats(0);
  const auto snapshot = allocator->snapshot({0, 0}, true);
  out << "{\"stats\": {";
  const char* pools[] = {"all", "small_pool", "large_pool"};
#define ARRAY(name)                              \
  for (int i = 0; i < 3; ++i) {                  \
    out << "\"" #name "." << pools[i] << "\": "; \
    write_stat(out, s.name[i]);                  \
    out << ", ";                                 \
  }
  ARRAY(allocation);
  ARRAY(segment);
  ARRAY(active);
  ARRAY(inactive_split);
  ARRAY(allocated_bytes);
  ARRAY(reserved_bytes);
  ARRAY(active_bytes);
  ARRAY(inactive_split_bytes);
  ARRAY(requested_bytes);
#undef ARRAY
  out << "\"oversize_allocations\": ";
  write_stat(out, s.oversize_allocations);
  out << ", \"oversize_segments\": ";
  write_stat(out, s.oversize_segments);
  for (const auto& [id, stats] : s.reserved_bytes_by_private_pools) {
    out << ", \"private." << id.first << '.' << id.second << "\": ";
    write_stat(out, stats[0]);
    out << ", \"private_small." << id.first << '.' << id.second << "\": ";
    write_stat(out, stats[1]);
  }
  out << ", \"num_alloc_retries\": " << s.num_alloc_retries << ", \"num_ooms\": " << s.num_ooms
      << ", \"num_sync_all_streams\": " << s.num_sync_all_streams << ", \"num_device_alloc\": " << s.num_device_alloc
      << ", \"num_device_free\": " << s.num_device_free << ", \"num_oom_rejections\": " << s.num_oom_rejections
      << ", \"max_split_size\": " << s.max_split_size << "}, \"segments\": [";
  bool first = true;
  for (const auto& segment : snapshot.segments) {
    out << (first ? "" : ", ") << "[" << segment.address << ", " << segment.total_size << ", "
        << reinterpret_cast<std::uintptr_t>(segment.stream) << ", " << segment.is_large << ", " << segment.is_expandable << ", "
        << segment.owner_private_pool_id.second << ", " << segment.requested_size << ", " << segment.allocated_size << ", "
        << segment.active_size << ", [";
    first = false;
    bool first_block = true;
    for (const auto& block : segment.blocks) {
      out << (first_block ? "" : ", ") << "[" << block.size << ", " << block.requested_size << ", " << block.allocated << ", "
          << block.active << "]";
      first_block = false;
    }
    out << "]]";
  }
  out << "], \"actions\": [";
  first = true;
  for (const auto& entry : snapshot.device_traces[0]) {
    out << (first ? "" : ", ") << "[" << entry.action_ << ", " << entry.addr_ << ", " << entry.size_ << ", "
        << reinterpret_cast<std::uintptr_t>(entry.stream_) << ", " << entry.mempool_.second << "]";
    first = false;
  }
  out << "], \"oom\": [" << out_of_memory << "]}";
  text = out.str();
  return text.c_str();
}
