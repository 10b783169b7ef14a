// Streams and events of the `sim` device.
//
// A stream is a FIFO of tasks with one worker thread, started on first use. A task stays at
// the head of the queue while it runs, so that after a fork the child, which has no worker,
// starts one and runs the interrupted task again from its beginning: tasks are copies and
// markers, which may run twice.
//
// `mutex_` guards the queue and the error; `pending_` may be read without it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/status.h"

namespace mybackend {

// A version is one recording. Waiting on an event means waiting on the version recorded last.
class SimEvent {
 public:
  std::uint64_t begin_record();
  void complete(std::uint64_t version, std::int64_t now_ns);
  bool query() const;
  std::uint64_t recorded_version() const;
  void wait(std::uint64_t version);
  bool recorded() const;
  std::int64_t completed_ns() const;

  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork(bool in_child);

 private:
  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::uint64_t recorded_ = 0;
  std::uint64_t completed_ = 0;
  std::int64_t completed_ns_ = 0;
};

class SimStream {
 public:
  // `queued` counts the tasks of all streams of a device.
  SimStream(int priority, std::atomic<std::int64_t>* queued) : priority_(priority), queued_(queued) {}
  ~SimStream();

  // Runs `task` after all earlier ones. A stream drains before it is destroyed.
  Status enqueue(const char* name, std::function<void()> task);
  bool idle() const noexcept { return pending_.load(std::memory_order_acquire) == 0; }
  // Waits until the queue is empty, then gives and clears the first error since the last call.
  Status synchronize();
  Status take_error();
  void resume();  // starts the worker if there is work without one
  int priority() const noexcept { return priority_; }

  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork(bool in_child);

 private:
  struct Task {
    std::string name;
    std::function<void()> run;
  };
  void work();
  void start_worker_locked();

  const int priority_;
  std::atomic<std::int64_t>* const queued_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  std::atomic<std::size_t> pending_{0};
  bool stopping_ = false;
  bool worker_running_ = false;
  std::string error_;
  std::unique_ptr<std::thread> worker_;
};

}  // namespace mybackend
