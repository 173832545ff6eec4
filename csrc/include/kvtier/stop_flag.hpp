// How a batch that runs is told that nobody waits for it any more.
#pragma once
#include <atomic>

namespace kvtier {

/// Set once, never cleared. Any thread.
class StopFlag {
 public:
  void set() { is_set_.store(true, std::memory_order_relaxed); }
  bool is_set() const { return is_set_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> is_set_ = false;
};

}  // namespace kvtier
