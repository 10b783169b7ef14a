#include "core/pinned_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "core/size_steps.h"

namespace mybackend {
namespace {

constexpr std::size_t kPageBytes = 4096;

}  // namespace

void PinnedCounter::increase(std::int64_t amount) noexcept {
  current += amount;
  allocated += amount;
  peak = std::max(peak, current);
}
void PinnedCounter::decrease(std::int64_t amount) noexcept {
  current -= amount;
  freed += amount;
}
void PinnedDuration::add(std::int64_t us) noexcept {
  min = count == 0 ? us : std::min(min, us);
  max = std::max(max, us);
  total += us;
  ++count;
}

PinnedCache::~PinnedCache() {
  stop_background_thread();
  empty_cache();
}

// --- The system -------------------------------------------------------------------------------

bool PinnedCache::pin(std::size_t bytes, const PinnedSettings& settings, Block* out) {
  const std::int64_t start_ns = steady_now_ns();
  void* ptr = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (ptr == MAP_FAILED) return false;
  if (settings.register_memory) {
    // Locking faults pages in one after the other, on one thread: let several do that first.
    const auto touch = [=](std::size_t from, std::size_t to) {
      for (std::size_t at = from; at < to; at += kPageBytes) static_cast<volatile char*>(ptr)[at] = 0;
    };
    const auto count = static_cast<std::size_t>(std::max(1, settings.register_threads));
    const std::size_t share = round_up(bytes / count + 1, kPageBytes);
    std::vector<std::thread> threads;
    for (std::size_t from = share; from < bytes; from += share) {
      try {
        threads.emplace_back(touch, from, std::min(bytes, from + share));
      } catch (...) {
        touch(from, std::min(bytes, from + share));  // no thread to be had
      }
    }
    touch(0, std::min(bytes, share));
    for (std::thread& thread : threads) thread.join();
  }
  *out = Block();
  out->address = reinterpret_cast<std::uintptr_t>(ptr);
  out->bytes = bytes;
  Driver* const registrar = registrar_.load();
  out->registered = registrar != nullptr && registrar->host_register(ptr, bytes).ok();
  out->locked = out->registered || mlock(ptr, bytes) == 0;
  const std::int64_t us = (steady_now_ns() - start_ns) / 1000;
  std::lock_guard lock(mutex_);
  stats_.host_alloc_us.add(us);
  stats_.segments.increase(1);
  stats_.reserved_bytes.increase(static_cast<std::int64_t>(bytes));
  ++class_counts_[bytes];
  if (!out->locked) stats_.unlocked_bytes += static_cast<std::int64_t>(bytes);
  return true;
}

void PinnedCache::unpin(const Block& block) noexcept {
  const std::int64_t start_ns = steady_now_ns();
  if (block.registered) (void)registrar_.load()->host_unregister(reinterpret_cast<void*>(block.address));
  munmap(reinterpret_cast<void*>(block.address), block.bytes);  // unlocks too
  const std::int64_t us = (steady_now_ns() - start_ns) / 1000;
  std::lock_guard lock(mutex_);
  stats_.host_free_us.add(us);
  stats_.segments.decrease(1);
  stats_.reserved_bytes.decrease(static_cast<std::int64_t>(block.bytes));
  if (!block.locked) stats_.unlocked_bytes -= static_cast<std::int64_t>(block.bytes);
}

void PinnedCache::set_registrar(Driver* driver) {
  std::lock_guard lock(mutex_);
  if (registrar_.exchange(driver) != nullptr) return;
  for (BlockList* blocks : {&in_use_, &pending_, &cached_}) {
    for (Block& block : *blocks) {
      if (!block.in_segment) register_locked(block, *driver);
    }
  }
  if (segment_.bytes != 0) register_locked(segment_, *driver);
}

void PinnedCache::register_locked(Block& block, Driver& driver) noexcept {
  block.registered = driver.host_register(reinterpret_cast<void*>(block.address), block.bytes).ok();
  if (!block.registered || block.locked) return;
  block.locked = true;
  stats_.unlocked_bytes -= static_cast<std::int64_t>(block.bytes);
}

void PinnedCache::release_all(BlockList& blocks) noexcept {
  for (const Block& block : blocks) unpin(block);
  blocks.clear();
}

// --- The reserved segment: first fit, free neighbours merged -----------------------------------

bool PinnedCache::take_from_segment_locked(std::size_t bytes, Block* out) {
  for (auto free = segment_free_.begin(); free != segment_free_.end(); ++free) {
    if (free->second < bytes) continue;
    *out = Block();
    out->address = free->first;
    out->bytes = bytes;
    out->locked = segment_.locked;
    out->in_segment = true;
    if (free->second > bytes) segment_free_.emplace(free->first + bytes, free->second - bytes);
    segment_free_.erase(free);
    return true;
  }
  return false;
}

void PinnedCache::return_to_segment_locked(const Block& block) {
  auto [at, inserted] = segment_free_.emplace(block.address, block.bytes);
  if (auto next = std::next(at); next != segment_free_.end() && at->first + at->second == next->first) {
    at->second += next->second;
    segment_free_.erase(next);
  }
  if (at != segment_free_.begin()) {
    if (auto previous = std::prev(at); previous->first + previous->second == at->first) {
      previous->second += at->second;
      segment_free_.erase(at);
    }
  }
}

// --- Allocation and free ------------------------------------------------------------------------

std::size_t PinnedCache::block_bytes(std::size_t bytes, const PinnedSettings& settings) noexcept {
  return bytes <= settings.round_threshold_bytes ? step_class_bytes(bytes, kPageBytes) : round_up(bytes, kPageBytes);
}

void* PinnedCache::allocate(std::size_t bytes) {
  if (bytes > (std::size_t{1} << 60)) return nullptr;
  BlockList released, made(1);
  bool found = false;
  std::size_t wanted = 0;
  PinnedSettings settings;
  std::size_t missing_segment_bytes = 0;
  {
    std::lock_guard lock(mutex_);
    settings = settings_;
    wanted = block_bytes(bytes, settings);
    process_events_locked(&released);
    if (auto c = classes_.find(wanted); c != classes_.end() && !c->second.empty()) {
      const BlockList::iterator cached = c->second.back();
      c->second.pop_back();
      made.clear();
      made.splice(made.begin(), cached_, cached);
      stats_.cached_bytes -= static_cast<std::int64_t>(wanted);
      ++stats_.hits;
      found = true;
    } else if (wanted <= settings.reserve_segment_bytes && segment_.bytes == 0) {
      missing_segment_bytes = settings.reserve_segment_bytes;
    } else if (take_from_segment_locked(wanted, &made.front())) {
      ++stats_.hits;
      found = true;
    }
  }
  release_all(released);
  if (missing_segment_bytes > 0) {
    Block segment;
    if (pin(round_up(missing_segment_bytes, kPageBytes), settings, &segment)) {
      bool surplus = false;
      {
        std::lock_guard lock(mutex_);
        surplus = segment_.bytes != 0;  // another thread was faster
        if (!surplus) {
          segment_ = segment;
          segment_free_.emplace(segment.address, segment.bytes);
        }
        found = take_from_segment_locked(wanted, &made.front());
      }
      if (surplus) unpin(segment);
    }
  }
  if (!found) {
    found = pin(wanted, settings, &made.front());
    if (!found) {
      empty_cache();
      found = pin(wanted, settings, &made.front());
    }
    if (!found) return nullptr;
    std::lock_guard lock(mutex_);
    ++stats_.misses;
  }
  std::lock_guard lock(mutex_);
  Block& result = made.front();
  result.requested_bytes = bytes;
  result.uses.clear();
  live_.emplace(result.address, made.begin());
  in_use_.splice(in_use_.end(), made);
  stats_.active_requests.increase(1);
  stats_.active_bytes.increase(static_cast<std::int64_t>(result.bytes));
  stats_.requested_bytes.increase(static_cast<std::int64_t>(bytes));
  return reinterpret_cast<void*>(result.address);
}

bool PinnedCache::free(void* ptr) noexcept {
  BlockList released;
  {
    std::lock_guard lock(mutex_);
    const auto found = live_.find(reinterpret_cast<std::uintptr_t>(ptr));
    if (found == live_.end()) {
      ++stats_.unknown_frees;
      return settings_.ignore_unknown_frees;
    }
    const BlockList::iterator block = found->second;
    live_.erase(found);
    for (const Use& use : block->uses) {
      EventHandle event = 0;
      if (!use.driver->event_create(use.device, &event).ok() || !use.driver->event_record(use.device, event, use.stream).ok()) {
        // Without an event there is only waiting.
        if (event != 0) use.driver->event_destroy(use.device, event);
        (void)use.driver->stream_synchronize(use.device, use.stream);
        continue;
      }
      block->events.push_back({use.driver, use.device, event});
    }
    block->uses.clear();
    if (block->events.empty()) {
      cache_or_release_locked(in_use_, block, &released);
    } else {
      pending_.splice(pending_.end(), in_use_, block);
      wake_background_.notify_one();
    }
  }
  release_all(released);
  return true;
}

// `block` of `from` (in_use_ or pending_), with no events left, ends: it is cached, or moved to *out.
void PinnedCache::cache_or_release_locked(BlockList& from, BlockList::iterator block, BlockList* out) noexcept {
  stats_.active_requests.decrease(1);
  stats_.active_bytes.decrease(static_cast<std::int64_t>(block->bytes));
  stats_.requested_bytes.decrease(static_cast<std::int64_t>(block->requested_bytes));
  if (block->in_segment) {
    return_to_segment_locked(*block);
    from.erase(block);
    return;
  }
  if (block->bytes > settings_.block_cached_bytes) {
    out->splice(out->end(), from, block);
    return;
  }
  cached_.splice(cached_.end(), from, block);
  classes_[block->bytes].push_back(block);
  stats_.cached_bytes += static_cast<std::int64_t>(block->bytes);
  evict_locked(out);
}

void PinnedCache::evict_locked(BlockList* out) noexcept {
  while (!cached_.empty() && static_cast<std::size_t>(stats_.cached_bytes) > settings_.total_cached_bytes) {
    const BlockList::iterator oldest = cached_.begin();
    stats_.cached_bytes -= static_cast<std::int64_t>(oldest->bytes);
    ++stats_.evictions;
    // The oldest of all is the oldest of its class.
    classes_.find(oldest->bytes)->second.pop_front();
    out->splice(out->end(), cached_, oldest);
  }
}

void PinnedCache::process_events_locked(BlockList* out) noexcept {
  for (auto block = pending_.begin(); block != pending_.end();) {
    const auto current = block++;
    while (!current->events.empty()) {
      const PendingEvent& last = current->events.back();
      if (last.driver->event_query(last.device, last.event).code() == StatusCode::kNotReady) break;
      last.driver->event_destroy(last.device, last.event);
      current->events.pop_back();
    }
    if (current->events.empty()) cache_or_release_locked(pending_, current, out);
  }
}

bool PinnedCache::record_use(const void* ptr, Driver* driver, int device, StreamHandle stream) {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::lock_guard lock(mutex_);
  auto next = live_.upper_bound(address);
  if (next == live_.begin()) return false;
  Block& block = *std::prev(next)->second;
  if (address >= block.address + block.bytes) return false;
  const Use use{driver, device, stream};
  if (std::find(block.uses.begin(), block.uses.end(), use) == block.uses.end()) block.uses.push_back(use);
  return true;
}

bool PinnedCache::contains(const void* ptr) const noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::lock_guard lock(mutex_);
  auto next = live_.upper_bound(address);
  if (next == live_.begin()) return false;
  const Block& block = *std::prev(next)->second;
  return address < block.address + block.bytes;
}

void PinnedCache::empty_cache() {
  BlockList released;
  {
    std::lock_guard lock(mutex_);
    process_events_locked(&released);
    released.splice(released.end(), cached_);
    classes_.clear();
    stats_.cached_bytes = 0;
    if (segment_.bytes != 0 && segment_free_.size() == 1 && segment_free_.begin()->second == segment_.bytes) {
      released.push_back(std::exchange(segment_, Block()));
      segment_free_.clear();
    }
  }
  release_all(released);
}

// --- Settings, statistics, background ------------------------------------------------------------

void PinnedCache::apply_settings(const PinnedSettings& settings) {
  BlockList released;
  {
    std::lock_guard lock(mutex_);
    settings_ = settings;
    for (auto block = cached_.begin(); block != cached_.end();) {  // a lower limit per block
      const auto current = block++;
      if (current->bytes <= settings.block_cached_bytes) continue;
      std::erase(classes_[current->bytes], current);
      stats_.cached_bytes -= static_cast<std::int64_t>(current->bytes);
      released.splice(released.end(), cached_, current);
    }
    evict_locked(&released);
  }
  release_all(released);
  if (settings.background_thread)
    start_background_thread();
  else
    stop_background_thread();
}

PinnedSettings PinnedCache::settings() const {
  std::lock_guard lock(mutex_);
  return settings_;
}

void PinnedCache::start_background_thread() {
  std::lock_guard lock(mutex_);
  if (background_.joinable()) return;
  stop_background_ = false;
  background_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    while (!stop_background_) {
      if (pending_.empty())
        wake_background_.wait(lock);
      else
        wake_background_.wait_for(lock, std::chrono::microseconds(200));
      BlockList released;
      process_events_locked(&released);
      lock.unlock();
      release_all(released);
      lock.lock();
    }
  });
}

void PinnedCache::stop_background_thread() {
  std::thread thread;
  {
    std::lock_guard lock(mutex_);
    stop_background_ = true;
    thread = std::move(background_);
    wake_background_.notify_all();
  }
  if (thread.joinable()) thread.join();
}

PinnedStats PinnedCache::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void PinnedCache::reset_peak() {
  std::lock_guard lock(mutex_);
  for (PinnedCounter* counter :
       {&stats_.active_requests, &stats_.active_bytes, &stats_.requested_bytes, &stats_.segments, &stats_.reserved_bytes}) {
    counter->peak = counter->current;
  }
}

void PinnedCache::reset_accumulated() {
  std::lock_guard lock(mutex_);
  for (PinnedCounter* counter :
       {&stats_.active_requests, &stats_.active_bytes, &stats_.requested_bytes, &stats_.segments, &stats_.reserved_bytes}) {
    counter->allocated = counter->freed = 0;
  }
  stats_.host_alloc_us = {};
  stats_.host_free_us = {};
  stats_.hits = stats_.misses = stats_.evictions = stats_.unknown_frees = 0;
  class_counts_.clear();
}

std::vector<std::pair<std::size_t, std::int64_t>> PinnedCache::class_counts() const {
  std::lock_guard lock(mutex_);
  return {class_counts_.begin(), class_counts_.end()};
}

void PinnedCache::lock_for_fork() {
  mutex_.lock();
}

void PinnedCache::unlock_after_fork(bool in_child) {
  if (in_child) {  // locks on memory are not inherited, and a registration is the parent's
    for (BlockList* list : {&in_use_, &pending_, &cached_}) {
      for (Block& block : *list) block.locked = block.registered = false;
    }
    segment_.locked = segment_.registered = false;
    registrar_.store(nullptr);
    stats_.unlocked_bytes = stats_.reserved_bytes.current;
  }
  if (in_child && background_.joinable()) {
    // The thread stayed in the parent. Its handle must not be joined or destroyed here.
    new (&background_) std::thread();
    new (&wake_background_) std::condition_variable();
    mutex_.unlock();
    start_background_thread();
    return;
  }
  mutex_.unlock();
}

}  // namespace mybackend
