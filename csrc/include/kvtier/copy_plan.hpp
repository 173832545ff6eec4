// Paged KV <-> block-first segments: where each byte lies on either side, and the copies between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvtier/host_copy.hpp"
#include "kvtier/thread_pool.hpp"

namespace kvtier {

/// One engine's page in one plane: rows of columns of runs. All strides and sizes in bytes.
struct PageShape {
  std::uint64_t page_count;
  std::uint64_t page_stride;
  std::uint64_t rows;
  std::uint64_t row_stride;
  std::uint64_t cols;
  std::uint64_t col_stride;
  std::uint64_t run_bytes;
};

/// Which pages go to (or come from) which segments, and which planes.
///
/// Chunk c is page_ids[page_offsets[c]] up to page_ids[page_offsets[c + 1]] and segments[c]; -1 is
/// a page to skip, its place in the segment stays as it is.
struct CopyRequest {
  std::span<const std::int64_t> page_ids;
  std::span<const std::uint32_t> page_offsets;
  std::span<const std::uint64_t> segments;  // addresses, one per chunk
  std::uint64_t first_plane;
  std::uint64_t plane_count;
};

/// The copy plan of one engine. A plane is one (layer, K or V), in stored order.
///
/// Byte x of (plane p, page g, row t, column h) lies in the engine at
///     plane_addresses[p] + g * page_stride + t * row_stride + h * col_stride + x
/// and, as page b of its chunk, in a segment of the planes [first, first + count) at
///     ((b * count + (p - first)) * rows * cols + t * cols + h) * run_bytes + x.
/// What is contiguous on both sides is copied as one run. Bound by memory bandwidth when runs have
/// some KiB. Immutable, so any thread may use it.
class CopyPlan {
 public:
  /// @throws std::invalid_argument for zero extents, a zero address, or places beyond 2^63
  CopyPlan(std::span<const std::uint64_t> plane_addresses, const PageShape& shape);

  std::uint64_t plane_count() const { return planes_.size(); }
  std::uint64_t page_count() const { return page_count_; }
  std::uint64_t plane_bytes() const { return rows_ * cols_ * run_bytes_; }
  /// What is copied as one piece of each plane.
  std::uint64_t run_bytes() const { return run_bytes_; }
  /// How many planes, from the first on, lie one behind the other on both sides: one piece.
  std::uint64_t joined_planes() const { return planes_.front().run_end; }
  std::uint64_t plane_address(std::uint64_t plane) const { return planes_[plane].address; }
  std::uint64_t page_stride() const { return page_stride_; }
  // Of what is copied as one piece: rows of columns of runs.
  std::uint64_t rows() const { return rows_; }
  std::uint64_t row_stride() const { return row_stride_; }
  std::uint64_t cols() const { return cols_; }
  std::uint64_t col_stride() const { return col_stride_; }
  /// From the first byte of the first page to the last byte of the last one, in each plane.
  std::uint64_t extent_bytes() const;

  /// How many pages a request copies.
  ///
  /// @throws std::invalid_argument it does not fit
  std::uint64_t check(const CopyRequest& request) const;

  /// Call `piece(paged address, stored address, bytes)` for each contiguous run of a request that
  /// was checked, in stored order.
  template <typename Piece>
  void for_each_run(const CopyRequest& request, Piece&& piece) const {
    const std::uint64_t block_bytes = request.plane_count * plane_bytes();
    for (std::size_t c = 0; c < request.segments.size(); ++c) {
      const std::size_t first = request.page_offsets[c];
      for (std::size_t i = first; i < request.page_offsets[c + 1]; ++i) {
        if (request.page_ids[i] < 0) continue;
        std::uint64_t stored = request.segments[c] + (i - first) * block_bytes;
        const std::uint64_t page = static_cast<std::uint64_t>(request.page_ids[i]) * page_stride_;
        for (std::uint64_t p = 0; p < request.plane_count; ++p) {
          const std::uint64_t plane = planes_[request.first_plane + p].address + page;
          for (std::uint64_t row = 0; row < rows_; ++row) {
            for (std::uint64_t col = 0; col < cols_; ++col, stored += run_bytes_) {
              piece(plane + row * row_stride_ + col * col_stride_, stored, run_bytes_);
            }
          }
        }
      }
    }
  }

  /// Engine pages into segments; returns the bytes moved.
  ///
  /// @throws std::invalid_argument, before anything is copied, for a request that does not fit
  std::uint64_t gather(ThreadPool& pool, const CopyRequest& request, CopyMode mode) const;

  /// Segments into engine pages. A page named twice gets either one's bytes, or a mixture.
  std::uint64_t scatter(ThreadPool& pool, const CopyRequest& request, CopyMode mode) const;

 private:
  struct Plane {
    std::uint64_t address;
    std::uint64_t run_end;  // the first later plane that does not continue this one in memory
  };

  template <bool kGather>
  std::uint64_t copy(ThreadPool& pool, const CopyRequest& request, CopyMode mode) const;
  std::vector<Plane> planes_;
  std::uint64_t page_count_;
  std::uint64_t page_stride_;
  // Collapsed: columns into the run and rows into the run where they are contiguous.
  std::uint64_t rows_;
  std::uint64_t row_stride_;
  std::uint64_t cols_;
  std::uint64_t col_stride_;
  std::uint64_t run_bytes_;
};

}  // namespace kvtier
