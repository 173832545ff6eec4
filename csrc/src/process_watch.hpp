// A process of this host, told apart from a later one with the same number.
#pragma once
#include <cstdint>

namespace kvtier {

/// When the process began, in the kernel's clock ticks after boot; 0 if there is none such.
std::uint64_t process_start(std::int64_t pid);

/// Holds one process by a pidfd, so that its number cannot come to mean another.
class ProcessWatch {
 public:
  /// `start` is what `process_start` gave for it; 0 takes whoever has the number now.
  /// @throws std::runtime_error there is no such process any more
  /// @throws std::system_error the kernel has no pidfd, or no more descriptors
  ProcessWatch(std::int64_t pid, std::uint64_t start);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  /// False from the moment it has ended, also before its parent has asked how.
  bool is_alive() const;
  /// Readable once it has ended.
  int fd() const { return fd_; }

 private:
  int fd_;
};

}  // namespace kvtier
