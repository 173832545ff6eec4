// Which of many things is due next. One thread.
#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>

namespace kvtier {

/// Holds only what is not over: who ends early takes itself out, so it does not grow with time.
class Deadlines {
 public:
  using Clock = std::chrono::steady_clock;

  void add(Clock::time_point when, std::uint64_t who) { entries_.emplace(when, who); }
  void remove(Clock::time_point when, std::uint64_t who) { entries_.erase({when, who}); }

  /// Takes out the one due longest, if any is due.
  std::optional<std::uint64_t> take_due(Clock::time_point now) {
    if (entries_.empty() || entries_.begin()->first > now) return std::nullopt;
    const std::uint64_t who = entries_.begin()->second;
    entries_.erase(entries_.begin());
    return who;
  }

  std::optional<Clock::time_point> next() const {
    if (entries_.empty()) return std::nullopt;
    return entries_.begin()->first;
  }

  bool is_empty() const { return entries_.empty(); }

 private:
  std::set<std::pair<Clock::time_point, std::uint64_t>> entries_;
};

}  // namespace kvtier
