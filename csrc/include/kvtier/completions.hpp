// Where the ends of transfers queue up until somebody asks: one queue for all backends of an agent.
//
// Backends push from any thread; the agent drains. Its eventfd is what a caller sleeps on in its
// own event loop, so the end of a transfer reaches it in one hop and nobody's code runs on our
// threads.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace kvtier {

/// The end of one posted transfer.
struct Completion {
  std::uint64_t ticket;
  /// Per piece: bytes moved, or -errno.
  std::vector<std::int64_t> results;
  /// Pieces from this one on were never begun: their target is untouched.
  std::uint64_t started;
  /// Nothing touches the memory of the transfer any more. When false, one `Quiet` follows later.
  bool is_quiet;
  /// Why it failed, in words; empty when it did not.
  std::string detail;
};

/// Bounded by the transfers in flight: each pushes at most two entries. Any thread.
class Completions {
 public:
  struct Drained {
    std::vector<Completion> ended;
    /// Tickets that ended before with `is_quiet` false and are quiet now.
    std::vector<std::uint64_t> quiet;
  };

  /// @throws std::system_error no eventfd is to be had
  Completions();
  ~Completions();
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  void push(Completion completion);
  void push_quiet(std::uint64_t ticket);
  /// Something else happened that whoever sleeps should look at: a message came.
  void signal();

  /// Everything pushed since the last call; in order.
  Drained drain();

  /// Counts pushes and signals; read it, look, and sleep in `wait` only if it has not moved since.
  std::uint64_t generation() const;
  /// Sleep until `generation()` is no longer `seen`; false when the time is over first.
  bool wait(std::uint64_t seen, std::chrono::nanoseconds timeout);

  /// Readable from a push or signal until `clear_fd`.
  int fd() const { return fd_; }
  void clear_fd();

 private:
  void wake();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Drained waiting_;
  std::uint64_t generation_ = 0;
  int fd_;
};

}  // namespace kvtier
