// What goes between a batch that runs and whoever waits for it: "end it", and how far it is.
#pragma once
#include <atomic>
#include <cstdint>

namespace kvtier {

/// Set once, never cleared; counts what was moved until then. Any thread.
class StopFlag {
 public:
  void set() { is_set_.store(true, std::memory_order_relaxed); }
  bool is_set() const { return is_set_.load(std::memory_order_relaxed); }

  void add_moved(std::uint64_t nbytes) { moved_.fetch_add(nbytes, std::memory_order_relaxed); }
  std::uint64_t moved_bytes() const { return moved_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> is_set_ = false;
  std::atomic<std::uint64_t> moved_ = 0;
};

}  // namespace kvtier
