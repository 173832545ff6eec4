#include "process_watch.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>

namespace kvtier {

std::array<std::uint8_t, 16> random_token() {
  std::random_device device;
  std::array<std::uint8_t, 16> token{};
  for (std::uint8_t& byte : token) byte = static_cast<std::uint8_t>(device());
  return token;
}

ProcessWatch::ProcessWatch(const ProcessMark& mark) : pid_(0), fd_(-1) {
  if (mark.pid == 0 || mark.pid > std::numeric_limits<pid_t>::max()) {
    throw std::runtime_error(std::to_string(mark.pid) + " is no process id");
  }
  pid_ = static_cast<pid_t>(mark.pid);
  fd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0U));
  if (fd_ < 0) {
    if (errno == ESRCH) throw std::runtime_error("no process " + std::to_string(pid_));
    throw std::system_error(errno, std::generic_category(), "pidfd_open");
  }
  // Read only now that the pidfd holds it: whoever has the mark is the one that is held.
  std::array<std::uint8_t, 16> token{};
  const iovec ours{token.data(), token.size()};
  const iovec its{reinterpret_cast<void*>(mark.address), token.size()};
  const std::int64_t got = read({&ours, 1}, {&its, 1});
  if (got == static_cast<std::int64_t>(token.size()) && token == mark.token && is_alive()) return;
  ::close(fd_);
  if (got == -EPERM || got == -ENOSYS || got == -EACCES) {
    throw std::system_error(static_cast<int>(-got), std::generic_category(), "process_vm_readv");
  }
  throw std::runtime_error("process " + std::to_string(pid_) + " is not the one meant");
}

ProcessWatch::~ProcessWatch() { ::close(fd_); }

bool ProcessWatch::is_alive() const {
  pollfd look{fd_, POLLIN, 0};
  return poll(&look, 1, 0) == 0;
}

std::int64_t ProcessWatch::read(std::span<const iovec> ours, std::span<const iovec> its) const {
  const ssize_t bytes = process_vm_readv(pid_, ours.data(), ours.size(), its.data(), its.size(), 0);
  return bytes < 0 ? -errno : bytes;
}

std::int64_t ProcessWatch::write(std::span<const iovec> ours, std::span<const iovec> its) const {
  const ssize_t bytes =
      process_vm_writev(pid_, ours.data(), ours.size(), its.data(), its.size(), 0);
  return bytes < 0 ? -errno : bytes;
}

}  // namespace kvtier
