// Threads that copy memory: asleep between jobs, never spinning.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

namespace kvtier {

/// The units of one job, handed out one at a time to whichever thread asks next.
class WorkUnits {
 public:
  explicit WorkUnits(std::size_t count) : count_(count) {}

  /// Sets `unit` to the next one; false when none is left.
  bool take(std::size_t& unit) {
    unit = next_.fetch_add(1, std::memory_order_relaxed);
    return unit < count_;
  }

 private:
  const std::size_t count_;
  std::atomic<std::size_t> next_ = 0;
};

/// A fixed set of threads that share one job at a time; the calling thread always works too.
///
/// Calls from several threads queue up. A thread that wakes too late finds no job and goes back to
/// sleep, so a call waits only for threads that have taken part in it: on a busy machine it never
/// takes longer than its caller alone would, plus one unit.
class ThreadPool {
 public:
  static constexpr std::size_t kThreadCountMax = 256;

  /// @param thread_count  including the caller of `run`; 1 makes no thread at all
  /// @throws std::invalid_argument unless 1 <= thread_count <= kThreadCountMax
  explicit ThreadPool(std::size_t thread_count);

  std::size_t thread_count() const { return threads_.size() + 1; }

  /// Calls `body(units)` on each thread that takes part; returns when all units are done.
  ///
  /// `body` takes units until there are none and must not throw. A single unit wakes nobody.
  template <typename Body>
  void run(std::size_t unit_count, const Body& body) {
    WorkUnits units(unit_count);
    if (unit_count <= 1 || threads_.empty()) {
      body(units);
      return;
    }
    Job job{[](const void* context, WorkUnits& shared) noexcept {
              (*static_cast<const Body*>(context))(shared);
            },
            &body, units};
    run_job(job, unit_count);
  }

 private:
  struct Job {
    void (*body)(const void* context, WorkUnits& units) noexcept;
    const void* context;
    WorkUnits& units;
  };

  void run_job(Job& job, std::size_t unit_count);
  void serve(const std::stop_token& stop);

  std::mutex queue_;  // held by the one caller whose job runs
  std::mutex mutex_;  // guards the rest
  std::condition_variable_any job_posted_;
  std::condition_variable job_left_;
  Job* job_ = nullptr;
  std::uint64_t job_number_ = 0;
  std::size_t busy_count_ = 0;
  std::vector<std::jthread> threads_;  // last: stops and joins before the rest goes
};

}  // namespace kvtier
