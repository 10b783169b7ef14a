// Frees that wait for other streams: one event per stream that used the block; the block is
// really free when the last of them is complete.
#include <algorithm>

#include "core/caching/caching_allocator.h"

namespace mybackend::caching {

void CachingAllocator::record_stream(void* ptr, StreamHandle stream) {
  Lock lock(mutex_);
  Block block = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (!block || !block.is_allocated() || stream == block.stream()) return;
  auto& uses = blocks_.need_extra(block).stream_uses;
  if (std::find(uses.begin(), uses.end(), stream) != uses.end()) return;
  uses.push_back(stream);
  record(Action::kRecordStream, block.address(), blocks_.requested_bytes(block), stream, &block.pool(), {});
}

EventHandle CachingAllocator::take_event() {
  if (!spare_events_.empty()) {
    const EventHandle event = spare_events_.back();
    spare_events_.pop_back();
    return event;
  }
  EventHandle event = 0;
  return driver_->event_create(device_, &event).ok() ? event : 0;
}

// Whether there is something to wait for.
bool CachingAllocator::record_events(Block block) {
  StreamTable<char> streams(StreamHash{device_});
  BlockExtra& extra = *blocks_.extra(block);
  for (StreamHandle stream : extra.stream_uses) streams[stream] = 1;
  extra.stream_uses.clear();
  streams.for_each([&](StreamHandle stream, char) {
    const EventHandle event = take_event();
    if (event == 0 || !driver_->event_record(device_, event, stream).ok()) {
      // Without an event there is only waiting. The block must not be reused before.
      if (event != 0) spare_events_.push_back(event);
      (void)driver_->stream_synchronize(device_, stream);
      return true;
    }
    ++extra.event_count;
    pending_events_[stream].push_back({event, block.address()});
    return true;
  });
  return extra.event_count > 0;
}

void CachingAllocator::record_deferred_events() {
  std::vector<std::uintptr_t> waiters;
  waiters.swap(event_waiters_);
  for (std::uintptr_t address : waiters) {
    const Block block = blocks_.find(address);
    if (!record_events(block)) put_back(block, {});
  }
}

// With graph_capture_record_stream_reuse: what a capture frees is marked in its graph, on each stream
// that used it.
void CachingAllocator::mark_uses(Block block) {
  if (!settings_.graph_capture_record_stream_reuse || block.pool().owner == nullptr) return;
  BlockExtra& extra = *blocks_.extra(block);
  std::vector<StreamHandle> streams = extra.stream_uses;
  streams.push_back(block.stream());
  std::vector<CaptureMarker> markers(streams.size());
  for (std::size_t i = 0; i < streams.size(); ++i) {
    // Without a mark on each, the block waits for the end of the capture.
    if (!driver_->capture_mark(device_, streams[i], &markers[i]).ok()) return;
  }
  extra.markers = std::move(markers);
}

// The blocks whose marks all come before what `stream` captures next: free for it.
void CachingAllocator::put_back_passed(StreamHandle stream, const Context& context) {
  std::vector<CaptureMarker> markers;
  std::vector<std::size_t> counts;  // of them, by waiter
  for (std::uintptr_t address : event_waiters_) {
    const Block block = blocks_.find(address);
    const auto& own = blocks_.extra(block)->markers;
    counts.push_back(block.stream() == stream ? own.size() : 0);
    if (counts.back() > 0) markers.insert(markers.end(), own.begin(), own.end());
  }
  std::vector<bool> passed;
  if (markers.empty() || !driver_->capture_passed(device_, stream, markers, &passed).ok()) return;
  std::vector<std::uintptr_t> waiting, ready;
  auto next = passed.cbegin();
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const auto end = next + static_cast<std::ptrdiff_t>(counts[i]);
    const bool is_ready = counts[i] > 0 && std::all_of(next, end, [](bool p) { return p; });
    (is_ready ? ready : waiting).push_back(event_waiters_[i]);
    next = end;
  }
  event_waiters_.swap(waiting);
  for (std::uintptr_t address : ready) put_back(blocks_.find(address), context);
}

void CachingAllocator::finish_event(std::uintptr_t address, const Context& context) {
  const Block block = blocks_.find(address);
  if (--blocks_.extra(block)->event_count == 0) put_back(block, context);
}

// Per stream first in, first out, up to the first that is not complete.
void CachingAllocator::process_events(const Context& context) {
  record_deferred_events();
  pending_events_.for_each([&](StreamHandle, std::deque<PendingEvent>& events) {
    while (!events.empty()) {
      const PendingEvent pending = events.front();
      const Status status = driver_->event_query(device_, pending.event);
      if (!status.ok()) break;  // not ready, or the query failed: ask again next time
      events.pop_front();
      spare_events_.push_back(pending.event);
      finish_event(pending.address, context);
    }
    return !events.empty();
  });
}

void CachingAllocator::synchronize_events(const Context& context, const PrivatePool* only) {
  ++stats_.num_sync_all_streams;
  record_deferred_events();
  pending_events_.for_each([&](StreamHandle, std::deque<PendingEvent>& events) {
    std::deque<PendingEvent> kept;
    for (const PendingEvent& pending : events) {
      if (only != nullptr && blocks_.find(pending.address).pool().owner != only) {
        kept.push_back(pending);
        continue;
      }
      (void)driver_->event_synchronize(device_, pending.event);
      spare_events_.push_back(pending.event);
      finish_event(pending.address, context);
    }
    events.swap(kept);
    return !events.empty();
  });
}

}  // namespace mybackend::caching
