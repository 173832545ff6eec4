// What has become of each piece of one transfer, while its requests end in any order. One thread.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvtier {

class PieceLedger {
 public:
  explicit PieceLedger(std::size_t count) : results_(count, 0) {}

  /// A part of the piece is there. Nothing heals a piece that failed.
  void arrived(std::size_t piece, std::uint64_t bytes) {
    std::int64_t& result = results_[piece];
    if (result >= 0) result += static_cast<std::int64_t>(bytes);
  }

  /// A part of the piece failed; the first reason stays.
  void failed(std::size_t piece, int code) {
    std::int64_t& result = results_[piece];
    if (result >= 0) result = -code;
  }

  /// Per piece its bytes if they are all there, else -errno: its own, or -`code`. Leaves it empty.
  ///
  /// @param length_of  gives the length of a piece; asked only where `may_be_whole`
  template <typename LengthOf>
  std::vector<std::int64_t> close(int code, bool may_be_whole, const LengthOf& length_of) {
    for (std::size_t i = 0; i < results_.size(); ++i) {
      if (results_[i] < 0) continue;
      if (may_be_whole && results_[i] == static_cast<std::int64_t>(length_of(i))) continue;
      results_[i] = -code;
    }
    return std::exchange(results_, {});
  }

 private:
  std::vector<std::int64_t> results_;
};

}  // namespace kvtier
