// Copies between this process and another, some megabytes at a time, shared by a few threads.
#pragma once
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvtier/thread_pool.hpp"
#include "process_watch.hpp"

namespace kvtier {

/// Filled, run and asked again and again; keeps its memory. One thread, and those of the pool.
class ProcessCopy {
 public:
  static constexpr std::uint64_t kBytesMax = 4 << 20;  // a millisecond or so, then deadlines count
  static constexpr std::size_t kPartsMax = 512;

  void begin(std::size_t first_piece) {
    ours_.clear();
    its_.clear();
    pieces_.clear();
    units_.clear();
    bytes_ = 0;
    piece_ = first_piece;
  }
  bool is_full() const { return bytes_ >= kBytesMax || ours_.size() >= kPartsMax; }

  /// Take as much of this part of the piece at hand as a unit of work holds; gives how much.
  std::uint64_t add(void* ours, void* its, std::uint64_t length) {
    if (units_.empty() || units_.back().bytes >= kUnitBytes) units_.push_back({ours_.size(), 0, 0});
    const std::uint64_t taken = std::min(length, kUnitBytes - units_.back().bytes);
    ours_.push_back({ours, taken});
    its_.push_back({its, taken});
    pieces_.push_back(piece_);
    units_.back().bytes += taken;
    bytes_ += taken;
    return taken;
  }
  void end_piece() { ++piece_; }
  std::uint64_t bytes() const { return bytes_; }

  void run(ThreadPool& pool, const ProcessWatch& process, bool is_read) {
    pool.run(units_.size(), [&](WorkUnits& units) {
      for (std::size_t i = 0; units.take(i);) {
        const auto [ours, its] = parts_of(i);
        units_[i].got = is_read ? process.read(ours, its) : process.write(ours, its);
      }
    });
  }

  /// Calls `tell(piece, bytes, code)` for each part, in order; `code` is 0 or an errno.
  template <typename Tell>
  void for_each(const Tell& tell) const {
    for (std::size_t i = 0; i < units_.size(); ++i) {
      const std::int64_t got = units_[i].got;
      std::uint64_t left = got < 0 ? 0 : static_cast<std::uint64_t>(got);
      const std::size_t end = i + 1 < units_.size() ? units_[i + 1].first : ours_.size();
      for (std::size_t part = units_[i].first; part < end; ++part) {
        const bool is_there = left >= ours_[part].iov_len;
        // The kernel says how much it did, and only of one that begins with the fault also why.
        tell(pieces_[part], ours_[part].iov_len,
             is_there ? 0 : (got < 0 ? static_cast<int>(-got) : EFAULT));
        left -= is_there ? ours_[part].iov_len : left;
      }
    }
  }

 private:
  static constexpr std::uint64_t kUnitBytes = 512 << 10;  // of one call; less costs more of them

  struct Unit {
    std::size_t first;  ///< of its parts
    std::uint64_t bytes;
    std::int64_t got;
  };
  struct Parts {
    std::span<const iovec> ours;
    std::span<const iovec> its;
  };

  Parts parts_of(std::size_t unit) const {
    const std::size_t first = units_[unit].first;
    const std::size_t end = unit + 1 < units_.size() ? units_[unit + 1].first : ours_.size();
    return {std::span(ours_).subspan(first, end - first),
            std::span(its_).subspan(first, end - first)};
  }

  std::vector<iovec> ours_;
  std::vector<iovec> its_;
  std::vector<std::size_t> pieces_;  // which piece each part is of
  std::vector<Unit> units_;
  std::uint64_t bytes_ = 0;
  std::size_t piece_ = 0;
};

}  // namespace kvtier
