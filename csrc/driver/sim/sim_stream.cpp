#include "driver/sim/sim_stream.h"

#include <exception>
#include <new>
#include <system_error>

namespace mybackend {
namespace {

// A condition variable that had waiters in the parent cannot be used or destroyed in the
// child of a fork; its bytes are given a fresh one.
void renew(std::condition_variable* variable) {
  new (variable) std::condition_variable();
}

}  // namespace

// --- SimEvent -------------------------------------------------------------------------------

std::uint64_t SimEvent::begin_record() {
  std::lock_guard lock(mutex_);
  return ++recorded_;
}

void SimEvent::complete(std::uint64_t version, std::int64_t now_ns) {
  std::lock_guard lock(mutex_);
  if (version > completed_) {
    completed_ = version;
    completed_ns_ = now_ns;
  }
  done_.notify_all();
}

bool SimEvent::query() const {
  std::lock_guard lock(mutex_);
  return completed_ >= recorded_;
}

std::uint64_t SimEvent::recorded_version() const {
  std::lock_guard lock(mutex_);
  return recorded_;
}

void SimEvent::wait(std::uint64_t version) {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return completed_ >= version; });
}

bool SimEvent::recorded() const {
  std::lock_guard lock(mutex_);
  return recorded_ > 0;
}

std::int64_t SimEvent::completed_ns() const {
  std::lock_guard lock(mutex_);
  return completed_ns_;
}

void SimEvent::unlock_after_fork(bool in_child) {
  if (in_child) renew(&done_);
  mutex_.unlock();
}

// --- SimStream ------------------------------------------------------------------------------

SimStream::~SimStream() {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (worker_ && worker_->joinable()) worker_->join();
}

void SimStream::start_worker_locked() {
  if (worker_running_) return;
  worker_ = std::make_unique<std::thread>([this] { work(); });
  worker_running_ = true;
}

Status SimStream::enqueue(const char* name, std::function<void()> task) {
  std::lock_guard lock(mutex_);
  try {
    start_worker_locked();
    queue_.push_back(Task{name, std::move(task)});
  } catch (const std::system_error& error) {
    return {StatusCode::kFailed, std::string("stream_enqueue: cannot start a thread: ") + error.what()};
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "stream_enqueue: no host memory for the queue"};
  }
  pending_.fetch_add(1, std::memory_order_release);
  queued_->fetch_add(1, std::memory_order_release);
  changed_.notify_all();
  return {};
}

void SimStream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;  // stopping, and drained
    Task& task = queue_.front();
    lock.unlock();
    std::string error;
    try {
      task.run();
    } catch (const std::exception& caught) {
      error = task.name + ": " + caught.what();
    } catch (...) {
      error = task.name + ": unknown exception";
    }
    lock.lock();
    // What the task owns may enter an allocator when it is destroyed, and that allocator may be
    // waiting for this stream: count it as done first, destroy it unlocked.
    Task finished = std::move(queue_.front());
    queue_.pop_front();
    if (!error.empty() && error_.empty()) error_ = std::move(error);
    pending_.fetch_sub(1, std::memory_order_release);
    queued_->fetch_sub(1, std::memory_order_release);
    changed_.notify_all();
    lock.unlock();
    finished = Task{};
    lock.lock();
  }
}

Status SimStream::synchronize() {
  if (!idle()) {
    std::unique_lock lock(mutex_);
    if (worker_ && worker_->get_id() == std::this_thread::get_id()) {
      return {StatusCode::kInvalidArgument, "stream_synchronize: called from a task of the same stream"};
    }
    start_worker_locked();  // after a fork the child has the queue but no worker yet
    changed_.wait(lock, [&] { return idle(); });
  }
  return take_error();
}

Status SimStream::take_error() {
  std::lock_guard lock(mutex_);
  if (error_.empty()) return {};
  return {StatusCode::kFailed, std::exchange(error_, std::string())};
}

void SimStream::resume() {
  std::lock_guard lock(mutex_);
  if (!idle()) start_worker_locked();
}

void SimStream::unlock_after_fork(bool in_child) {
  if (in_child) {
    renew(&changed_);
    (void)worker_.release();  // the parent's thread; it does not exist here
    worker_running_ = false;
  }
  mutex_.unlock();
}

}  // namespace mybackend
