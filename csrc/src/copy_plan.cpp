#include "kvtier/copy_plan.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvtier {
namespace {

constexpr std::uint64_t kBytesMax = std::numeric_limits<std::int64_t>::max();

std::uint64_t multiply_checked(std::uint64_t left, std::uint64_t right) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(left, right, &product) || product > kBytesMax) {
    throw std::invalid_argument("the layout spans more than 2^63 bytes");
  }
  return product;
}

std::uint64_t add_checked(std::uint64_t left, std::uint64_t right) {
  if (left > kBytesMax || right > kBytesMax - left) {
    throw std::invalid_argument("the layout spans more than 2^63 bytes");
  }
  return left + right;
}

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

}  // namespace

CopyPlan::CopyPlan(std::span<const std::uint64_t> plane_addresses, const PageShape& shape)
    : page_count_(shape.page_count),
      page_stride_(shape.page_stride),
      rows_(shape.rows),
      row_stride_(shape.row_stride),
      cols_(shape.cols),
      col_stride_(shape.col_stride),
      run_bytes_(shape.run_bytes) {
  if (plane_addresses.empty()) refuse("no planes");
  if (page_count_ == 0 || rows_ == 0 || cols_ == 0 || run_bytes_ == 0) {
    refuse("page_count " + std::to_string(page_count_) + ", rows " + std::to_string(rows_) +
           ", cols " + std::to_string(cols_) + ", run_bytes " + std::to_string(run_bytes_) +
           ": all must be at least 1");
  }
  // The far ends of both sides fit, so no sum or product below can wrap.
  std::uint64_t extent = multiply_checked(page_count_ - 1, page_stride_);
  extent = add_checked(extent, multiply_checked(rows_ - 1, row_stride_));
  extent = add_checked(extent, multiply_checked(cols_ - 1, col_stride_));
  extent = add_checked(extent, run_bytes_);
  const std::uint64_t plane_bytes = multiply_checked(multiply_checked(rows_, cols_), run_bytes_);
  multiply_checked(plane_bytes, plane_addresses.size());
  for (std::size_t p = 0; p < plane_addresses.size(); ++p) {
    if (plane_addresses[p] == 0) refuse("plane " + std::to_string(p) + " has address 0");
    if (plane_addresses[p] > std::numeric_limits<std::uint64_t>::max() - extent) {
      refuse("plane " + std::to_string(p) + " ends beyond all addresses");
    }
  }

  if (cols_ == 1 || col_stride_ == run_bytes_) {
    run_bytes_ *= cols_;
    cols_ = 1;
  }
  if (cols_ == 1 && (rows_ == 1 || row_stride_ == run_bytes_)) {
    run_bytes_ *= rows_;
    rows_ = 1;
  }
  planes_.resize(plane_addresses.size());
  for (std::size_t p = planes_.size(); p-- > 0;) {
    const bool continued = p + 1 < planes_.size() && rows_ == 1 && cols_ == 1 &&
                           plane_addresses[p + 1] == plane_addresses[p] + run_bytes_;
    planes_[p] = {plane_addresses[p], continued ? planes_[p + 1].run_end : p + 1};
  }
}

std::uint64_t CopyPlan::gather(ThreadPool& pool, const CopyRequest& request, CopyMode mode) const {
  return copy<true>(pool, request, mode);
}

std::uint64_t CopyPlan::scatter(ThreadPool& pool, const CopyRequest& request, CopyMode mode) const {
  return copy<false>(pool, request, mode);
}

std::uint64_t CopyPlan::extent_bytes() const {
  return (page_count_ - 1) * page_stride_ + (rows_ - 1) * row_stride_ + (cols_ - 1) * col_stride_ +
         run_bytes_;
}

std::uint64_t CopyPlan::check(const CopyRequest& request) const {
  if (request.plane_count == 0 || request.first_plane >= planes_.size() ||
      request.plane_count > planes_.size() - request.first_plane) {
    refuse("planes " + std::to_string(request.first_plane) + " + " +
           std::to_string(request.plane_count) + " of " + std::to_string(planes_.size()));
  }
  if (request.page_offsets.size() != request.segments.size() + 1) {
    refuse(std::to_string(request.page_offsets.size()) + " page offsets for " +
           std::to_string(request.segments.size()) + " segments, must be one more");
  }
  if (!std::is_sorted(request.page_offsets.begin(), request.page_offsets.end())) {
    refuse("page offsets decrease");
  }
  if (request.page_offsets.back() > request.page_ids.size()) {
    refuse("page offset " + std::to_string(request.page_offsets.back()) + " of " +
           std::to_string(request.page_ids.size()) + " page ids");
  }
  std::uint64_t copied_count = 0;
  for (std::size_t c = 0; c < request.segments.size(); ++c) {
    const std::uint64_t pages = request.page_offsets[c + 1] - request.page_offsets[c];
    if (pages > 0 && request.segments[c] == 0) {
      refuse("segment " + std::to_string(c) + " has address 0");
    }
    std::uint64_t segment_bytes = 0;
    if (__builtin_mul_overflow(pages, request.plane_count * plane_bytes(), &segment_bytes) ||
        segment_bytes > std::numeric_limits<std::uint64_t>::max() - request.segments[c]) {
      refuse("segment " + std::to_string(c) + " ends beyond all addresses");
    }
  }
  for (std::size_t i = request.page_offsets.front(); i < request.page_offsets.back(); ++i) {
    const std::int64_t page = request.page_ids[i];
    if (page < -1 || (page >= 0 && static_cast<std::uint64_t>(page) >= page_count_)) {
      refuse("page " + std::to_string(page) + " at position " + std::to_string(i) + " of " +
             std::to_string(page_count_) + " pages");
    }
    if (page >= 0) ++copied_count;
  }
  return copied_count;
}

template <bool kGather>
std::uint64_t CopyPlan::copy(ThreadPool& pool, const CopyRequest& request, CopyMode mode) const {
  const std::uint64_t copied_count = check(request);
  const std::uint64_t page_bytes = request.plane_count * plane_bytes();
  const std::uint64_t total_bytes = copied_count * page_bytes;
  if (total_bytes == 0) return 0;

  // Runs of planes: what lies together on both sides, up to a lane's share of a unit.
  struct PlaneRun {
    std::uint64_t address;
    std::uint64_t stored_offset;
    std::uint64_t bytes;  // of one innermost run
  };
  constexpr std::uint64_t kUnitBytes = std::uint64_t{1} << 20;  // some 100 us: far above a wake-up
  std::vector<PlaneRun> runs;
  const std::uint64_t end_plane = request.first_plane + request.plane_count;
  const std::uint64_t planes_max =
      std::max<std::uint64_t>(1, kUnitBytes / kCopyLanes / plane_bytes());
  for (std::uint64_t p = request.first_plane; p < end_plane;) {
    const std::uint64_t next = std::min({planes_[p].run_end, end_plane, p + planes_max});
    runs.push_back(
        {planes_[p].address, (p - request.first_plane) * plane_bytes(), (next - p) * run_bytes_});
    p = next;
  }

  // The pages to copy, each with its place in its segment.
  struct PageCopy {
    std::uint64_t paged_offset;
    std::uint64_t stored_address;
  };
  std::vector<PageCopy> pages;
  pages.reserve(copied_count);
  for (std::size_t c = 0; c < request.segments.size(); ++c) {
    const std::size_t first = request.page_offsets[c];
    for (std::size_t i = first; i < request.page_offsets[c + 1]; ++i) {
      if (request.page_ids[i] < 0) continue;
      pages.push_back({static_cast<std::uint64_t>(request.page_ids[i]) * page_stride_,
                       request.segments[c] + (i - first) * page_bytes});
    }
  }

  if (mode == CopyMode::kAuto) mode = choose_copy_mode(runs.front().bytes, total_bytes);
  const CopyKernel kernel = copy_kernel(mode);
  // The two loops over a page's rows and columns. Sources are read in their own order, which keeps
  // their lines prefetched; where targets are written matters less, as whole lines go past the
  // cache.
  struct Loop {
    std::uint64_t count;
    std::uint64_t paged_stride;
    std::uint64_t stored_stride;
  };
  Loop outer{rows_, row_stride_, cols_ * run_bytes_};
  Loop inner{cols_, col_stride_, run_bytes_};
  if (kGather && row_stride_ < col_stride_) std::swap(outer, inner);

  using Lanes = std::array<std::byte*, kCopyLanes>;
  const auto copy_lanes = [&](const Lanes& paged, const Lanes& stored, std::size_t lane_count,
                              std::uint64_t bytes) {
    for (std::uint64_t i = 0; i < outer.count; ++i) {
      for (std::uint64_t j = 0; j < inner.count; ++j) {
        const std::uint64_t paged_offset = i * outer.paged_stride + j * inner.paged_stride;
        const std::uint64_t stored_offset = i * outer.stored_stride + j * inner.stored_stride;
        Lanes targets;
        Lanes sources;
        for (std::size_t lane = 0; lane < lane_count; ++lane) {
          targets[lane] = kGather ? stored[lane] + stored_offset : paged[lane] + paged_offset;
          sources[lane] = kGather ? paged[lane] + paged_offset : stored[lane] + stored_offset;
        }
        if (lane_count == kCopyLanes) {
          kernel.lanes(targets.data(), sources.data(), bytes);
          continue;
        }
        for (std::size_t lane = 0; lane < lane_count; ++lane) {
          kernel.one(targets[lane], sources[lane], bytes);
        }
      }
    }
  };

  // A unit is a stretch of (page, plane run) pairs in stored order, in whole groups of lanes.
  const std::uint64_t pair_count = pages.size() * runs.size();
  const std::uint64_t groups_per_unit = kUnitBytes * pair_count / total_bytes / kCopyLanes;
  const std::uint64_t pairs_per_unit = std::max<std::uint64_t>(1, groups_per_unit) * kCopyLanes;
  pool.run((pair_count - 1) / pairs_per_unit + 1, [&](WorkUnits& units) {
    for (std::size_t unit = 0; units.take(unit);) {
      std::uint64_t pair = unit * pairs_per_unit;
      const std::uint64_t end_pair = std::min(pair + pairs_per_unit, pair_count);
      while (pair < end_pair) {
        Lanes paged;
        Lanes stored;
        std::size_t lane_count = 0;
        const std::uint64_t bytes = runs[pair % runs.size()].bytes;
        for (; lane_count < kCopyLanes && pair < end_pair; ++lane_count, ++pair) {
          const PageCopy& page = pages[pair / runs.size()];
          const PlaneRun& run = runs[pair % runs.size()];
          if (run.bytes != bytes) break;
          // The caller's addresses become memory here and nowhere else.
          paged[lane_count] = reinterpret_cast<std::byte*>(run.address + page.paged_offset);
          stored[lane_count] =
              reinterpret_cast<std::byte*>(page.stored_address + run.stored_offset);
        }
        copy_lanes(paged, stored, lane_count, bytes);
      }
    }
    copy_fence();
  });
  return total_bytes;
}

}  // namespace kvtier
