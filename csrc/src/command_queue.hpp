// What other threads want done by the one thread that may do it.
#pragma once
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <functional>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

namespace kvtier {

/// Commands in the order they came. Any thread pushes, one takes; its fd is what that one sleeps
/// on.
class CommandQueue {
 public:
  using Command = std::function<void()>;
  enum class Pushed { kYes, kFull, kClosed };

  /// @throws std::system_error no eventfd is to be had
  explicit CommandQueue(std::size_t capacity)
      : capacity_(capacity), fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~CommandQueue() { ::close(fd_); }
  CommandQueue(const CommandQueue&) = delete;
  CommandQueue& operator=(const CommandQueue&) = delete;

  /// `must` passes the bound: for commands of which each needs one that was bounded before it.
  Pushed push(Command command, bool must = false) {
    {
      const std::lock_guard lock(mutex_);
      if (is_closed_) return Pushed::kClosed;
      if (!must && waiting_.size() >= capacity_) return Pushed::kFull;
      waiting_.push_back(std::move(command));
      has_some_.store(true, std::memory_order_release);
    }
    wake();
    return Pushed::kYes;
  }

  /// Push the last one. False if there was a last one already.
  bool close(Command last) {
    {
      const std::lock_guard lock(mutex_);
      if (is_closed_) return false;
      is_closed_ = true;
      waiting_.push_back(std::move(last));
      has_some_.store(true, std::memory_order_release);
    }
    wake();
    return true;
  }

  /// All that wait; costs one load when there are none.
  std::vector<Command> take() {
    if (!has_some_.load(std::memory_order_acquire)) return {};
    const std::lock_guard lock(mutex_);
    has_some_.store(false, std::memory_order_relaxed);
    return std::exchange(waiting_, {});
  }

  bool has_some() const { return has_some_.load(std::memory_order_acquire); }

  /// Readable from a push until `clear_fd`.
  int fd() const { return fd_; }
  void clear_fd() {
    eventfd_t count = 0;
    eventfd_read(fd_, &count);  // EAGAIN: it was clear already
  }

 private:
  void wake() { eventfd_write(fd_, 1); }  // EAGAIN: it is at its most, so it is readable anyway

  const std::size_t capacity_;
  std::mutex mutex_;
  std::vector<Command> waiting_;
  bool is_closed_ = false;
  std::atomic<bool> has_some_ = false;
  const int fd_;
};

}  // namespace kvtier
