// Arguments of the RoPE shift: K as it would be at positions later or earlier by a difference.
#pragma once

#include "elements.h"

namespace kvtier::device {

/// One launch: K in place on its pages, or from stored blocks to pages in one go.
///
/// For each pair (x, y) of a rotation, both the cosine c and the sine s of its angle
/// (difference * inverse frequency) given by the host in fp32, without any factor:
///   x' = x * c - y * s,  y' = y * c + x * s
/// in fp32, each operation rounded to nearest even by itself, then the same to the element type.
/// Elements from `rotary_elements` on are left as they are. A NaN gives some NaN.
///
/// Neox: element i is paired with i + rotary_elements / 2. Interleaved: 2 i with 2 i + 1.
/// The paged side and the stored side are as CopyArgs's, with a run of one head, never joined to
/// the next; all addresses and strides are multiples of 16 bytes. In place, no page may be twice
/// among `pages`, and stored addresses are not looked at.
///
/// Grid: any number of CTAs of kRopeThreads; no shared memory. Bound by HBM.
struct RopeArgs {
  const std::uint64_t* planes;      // device memory: the planes that hold K
  const PageEntry* pages;           // device memory
  const float* units;               // device memory, [unit][pair][2]: cosine, sine
  const std::uint32_t* page_units;  // device memory: each page's unit; null: unit 0 for all
  std::int64_t row_stride;
  std::int64_t col_stride;
  std::int64_t stored_plane_stride;
  std::int64_t stored_row_stride;
  std::int64_t stored_col_stride;
  std::uint32_t total;  // work items of threads, below 2^31: pages x the extents below
  ElementType element;
  std::uint32_t is_from_stored;   // 0: in place
  std::uint32_t run_elements;     // a multiple of 8
  std::uint32_t rotary_elements;  // a multiple of 16, at most run_elements
  FastDiv pieces;  // of a run: 16 elements each, those of the rotation first; in place only they
  FastDiv cols;
  FastDiv rows;
  FastDiv plane_count;  // innermost to outermost; pages are what is left
};

constexpr std::uint32_t kRopeThreads = 256;

}  // namespace kvtier::device
