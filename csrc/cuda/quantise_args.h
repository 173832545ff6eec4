// Arguments of the quantise and dequantise kernels, and the stored form they write and read.
//
// A tile is what one plane holds of one page: `rows` tokens x `cols` heads x `run_elements` of a
// head's dimension. Quantised, it is contiguous and begins at a multiple of 16 bytes:
//
//   codes        [token][head][element], `bits` each, the first element in the lowest bits of its
//                byte; from the tile's beginning
//   boost codes  [token][head][rank], 2 bits each: boosted tiles only; from `boost_offset`
//   parameters   one 4-byte pair (scale fp16, then zero fp16) a group; from `parameters_offset`:
//                [token][head][group of elements]     token axis: a group is 32, 64, 128 or 256
//                                                     consecutive elements of one token and head
//                [group of tokens][head][element]     channel axis: a group is `group_rows`
//                                                     consecutive tokens of one element
//
// Every part begins at a multiple of 16 bytes; what lies between them is neither read nor written.
// The last group of a run or of a tile may be shorter. Parameters are fp16: fp32 would cost groups
// of 32 and of 16 elements another 1 and 2 bits each. An fp16 holds exactly every fp16 zero, and
// every bf16 one from 2^-14 to 65280 in magnitude.
//
// Quantising computes in fp32, every operation rounded to nearest even by itself:
//   low, high  the least and the greatest of the group without its NaNs, each then into
//              [-65504, 65504]; both 0 if there are only NaNs
//   zero       fp16(low), +0 in place of -0
//   scale      fp16((high - zero) * fp32(1 / largest)), 0 unless high > zero
//   code       round(into [0, largest] of (x - zero) * (1 / scale)); 0 for a NaN, and where scale
//   is 0
// with the largest code 255, 15 or 3, and 15 for a boosted channel. Dequantising gives
//   min(code * scale + zero, 65504), rounded to nearest even to the element type.
// So a NaN becomes its group's least value, infinities and what is beyond fp16 become the group's
// ends, neither reaches into another group, and a group of equal elements is exact for fp16.
//
// Boosted tiles (K by channel): 2 bits, and 2 bits more for `boosted` channels of each head. Of a
// boosted channel's 4-bit code the upper two bits are among the codes, the lower two among the
// boost codes at the channel's rank: how many boosted channels of its head lie before it.
#pragma once

#include "elements.h"

namespace kvtier::device {

/// One launch. The paged side is as CopyArgs's, with a run of one head, never joined to the next;
/// the tile of page i and plane p begins at pages[i].stored_address + p * stored_plane_stride.
/// Paged addresses and strides, and all of the stored side, are multiples of 16 bytes.
///
/// Grid: any number of CTAs of kQuantiseThreads; no shared memory. Bound by HBM: every thread has
/// four or more loads of 16 bytes under way.
struct QuantiseArgs {
  const std::uint64_t* planes;  // device memory
  const PageEntry* pages;       // device memory
  // Boosted tiles only, device memory. [plane][head][octet]: the octet's mask of boosted channels
  // in the lower byte, the rank of the first of them in the upper. [plane][head][rank]: the
  // channel.
  const std::uint16_t* boost_octets;
  const std::uint8_t* boost_channels;
  std::int64_t row_stride;
  std::int64_t col_stride;
  std::int64_t stored_plane_stride;
  std::uint32_t parameters_offset;  // from a tile's beginning, as boost_offset
  std::uint32_t boost_offset;
  std::uint32_t total;  // work items of threads, below 2^31: pages x the extents below
  ElementType element;
  std::uint32_t run_elements;  // a multiple of 8; boosted tiles: at most 256
  std::uint32_t cols;
  std::uint32_t rows;
  std::uint32_t group_rows;   // channel axis
  std::uint32_t group_shift;  // token axis: a group is 8 << group_shift elements
  std::uint32_t boosted;      // channels of each head: a multiple of 4, at most half of them
  FastDiv octets;             // of a run; token axis: of its whole groups
  FastDiv heads;              // cols; boosted tiles: warps for the heads of a row
  FastDiv lines;              // token axis: rows; channel axis: groups of rows
  FastDiv plane_count;        // innermost to outermost; pages are what is left
};

/// Boosted tiles: whole heads go to a warp, as many as fit, and every warp is 32 work items.
constexpr std::uint32_t kWarpLanes = 32;
constexpr std::uint32_t kQuantiseThreads = 256;

}  // namespace kvtier::device
