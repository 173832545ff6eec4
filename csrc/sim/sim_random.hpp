// The simulator's random numbers: one seed, one run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace kvtier::sim {

/// SplitMix64 (Steele, Lea and Flood, 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  /// 0 up to bound - 1; the bias of a bound far below 2^64 does not matter here.
  std::size_t below(std::size_t bound) { return next() % bound; }

  template <typename Items>
  void shuffle(Items& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvtier::sim
