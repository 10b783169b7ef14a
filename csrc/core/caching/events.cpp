// Frees that wait for other streams: one event per stream that used the block; the block is
// really free when the last of them is complete.
#include <algorithm>

#include "core/caching/caching_allocator.h"

namespace mybackend::caching {

void CachingAllocator::record_stream(void* ptr, StreamHandle stream) {
  Lock lock(mutex_);
  Block* block = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (block == nullptr || !block->allocated || stream == block->stream()) return;
  auto& uses = block->need_extra().stream_uses;
  if (std::find(uses.begin(), uses.end(), stream) != uses.end()) return;
  uses.push_back(stream);
  record(Action::kRecordStream, block->address, block->requested_bytes, stream, &block->pool(), {});
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

void CachingAllocator::record_events(Block* block) {
  StreamTable<char> streams(StreamHash{device_});
  BlockExtra& extra = block->need_extra();
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
    pending_events_[stream].push_back({event, block});
    return true;
  });
}

void CachingAllocator::record_deferred_events() {
  std::vector<Block*> waiters;
  waiters.swap(event_waiters_);
  for (Block* block : waiters) {
    record_events(block);
    if (block->extra->event_count == 0) put_back(block, {});
  }
}

// With graph_capture_record_stream_reuse: what a capture frees is marked in its graph, on each stream
// that used it.
void CachingAllocator::mark_uses(Block* block) {
  if (!settings_.graph_capture_record_stream_reuse || block->pool().owner == nullptr) return;
  BlockExtra& extra = block->need_extra();
  std::vector<StreamHandle> streams = extra.stream_uses;
  streams.push_back(block->stream());
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
  for (const Block* block : event_waiters_) {
    if (block->stream() == stream) markers.insert(markers.end(), block->extra->markers.begin(), block->extra->markers.end());
  }
  std::vector<bool> passed;
  if (markers.empty() || !driver_->capture_passed(device_, stream, markers, &passed).ok()) return;
  std::vector<Block*> waiting, ready;
  auto next = passed.cbegin();
  for (Block* block : event_waiters_) {
    const auto count = block->stream() == stream ? static_cast<std::ptrdiff_t>(block->extra->markers.size()) : 0;
    const bool is_ready = count > 0 && std::all_of(next, next + count, [](bool p) { return p; });
    (is_ready ? ready : waiting).push_back(block);
    next += count;
  }
  event_waiters_.swap(waiting);
  for (Block* block : ready) {
    block->extra->stream_uses.clear();
    put_back(block, context);
  }
}

void CachingAllocator::finish_event(Block* block, const Context& context) {
  if (--block->extra->event_count == 0) put_back(block, context);
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
      finish_event(pending.block, context);
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
      if (only != nullptr && pending.block->pool().owner != only) {
        kept.push_back(pending);
        continue;
      }
      (void)driver_->event_synchronize(device_, pending.event);
      spare_events_.push_back(pending.event);
      finish_event(pending.block, context);
    }
    events.swap(kept);
    return !events.empty();
  });
}

}  // namespace mybackend::caching
