#include "kvtier/completions.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace kvtier {

Completions::Completions() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Completions::~Completions() { close(fd_); }

void Completions::push(Completion completion) {
  {
    const std::lock_guard lock(mutex_);
    waiting_.ended.push_back(std::move(completion));
    ++generation_;
  }
  wake();
}

void Completions::push_quiet(std::uint64_t ticket) {
  {
    const std::lock_guard lock(mutex_);
    waiting_.quiet.push_back(ticket);
    ++generation_;
  }
  wake();
}

void Completions::signal() {
  {
    const std::lock_guard lock(mutex_);
    ++generation_;
  }
  wake();
}

Completions::Drained Completions::drain() {
  const std::lock_guard lock(mutex_);
  return std::exchange(waiting_, {});
}

std::uint64_t Completions::generation() const {
  const std::lock_guard lock(mutex_);
  return generation_;
}

bool Completions::wait(std::uint64_t seen, std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return generation_ != seen; });
}

void Completions::clear_fd() {
  eventfd_t count = 0;
  eventfd_read(fd_, &count);  // EAGAIN: it was clear already
}

void Completions::wake() {
  changed_.notify_all();
  eventfd_write(fd_, 1);  // EAGAIN: it is at its most, so it is readable anyway
}

}  // namespace kvtier
