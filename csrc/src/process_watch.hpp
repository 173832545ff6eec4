// A process of this host: told apart from a later one with its number, and its memory reached.
#pragma once
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kvtier {

/// Bytes in a process's memory that say who it is.
struct ProcessMark {
  std::uint64_t pid;
  std::uint64_t address;
  std::array<std::uint8_t, 16> token;
};

/// Random bytes that stay where they are, for `ProcessMark`.
std::array<std::uint8_t, 16> random_token();

/// Holds one process by a pidfd, so that its number cannot come to mean another.
class ProcessWatch {
 public:
  /// @throws std::runtime_error the process has ended, or is not the one with the mark
  /// @throws std::system_error the kernel does not let us watch it, or reach its memory
  explicit ProcessWatch(const ProcessMark& mark);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  /// False from the moment it has ended, also before its parent has asked how.
  bool is_alive() const;
  /// Readable once it has ended.
  int fd() const { return fd_; }

  /// Copy between its memory and ours; gives bytes, fewer where its memory ends, or -errno.
  ///
  /// One copy, by the kernel on this thread; the process takes no part, it may even be stopped.
  /// Only while it lives do the bytes mean anything: ask `is_alive` after the last.
  std::int64_t read(std::span<const iovec> ours, std::span<const iovec> its) const;
  std::int64_t write(std::span<const iovec> ours, std::span<const iovec> its) const;

 private:
  pid_t pid_;
  int fd_;
};

}  // namespace kvtier
