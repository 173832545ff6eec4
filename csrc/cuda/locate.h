// Where the parts of a copy lie: from a vector's number to its address on either side.
#pragma once

#include "device.h"

namespace kvtier::device {

/// Where one vector (or, for bulk kernels, one run) lies on either side.
struct CopyPlace {
  std::uint64_t paged;
  std::uint64_t stored;
};

/// @param index  below arguments.total
KVTIER_DEVICE CopyPlace locate(const CopyArgs& arguments, std::uint32_t index, int vector_bytes) {
  const std::uint32_t run = arguments.vectors.quotient(index);
  const std::uint32_t row_index = arguments.cols.quotient(run);
  const std::uint32_t plane_index = arguments.rows.quotient(row_index);
  const std::uint32_t page = arguments.plane_count.quotient(plane_index);
  // Signed and 64 bits wide: strides may be negative, and offsets pass 4 GiB.
  const std::int64_t x =
      static_cast<std::int64_t>(index - run * arguments.vectors.divisor) * vector_bytes;
  const std::int64_t col = run - row_index * arguments.cols.divisor;
  const std::int64_t row = row_index - plane_index * arguments.rows.divisor;
  const std::uint32_t plane = plane_index - page * arguments.plane_count.divisor;
  const PageEntry entry = arguments.pages[page];
  const std::int64_t paged =
      entry.paged_offset + row * arguments.row_stride + col * arguments.col_stride + x;
  const std::int64_t stored = static_cast<std::int64_t>(plane) * arguments.stored_plane_stride +
                              row * arguments.stored_row_stride +
                              col * arguments.stored_col_stride + x;
  return {arguments.planes[plane] + static_cast<std::uint64_t>(paged),
          entry.stored_address + static_cast<std::uint64_t>(stored)};
}

}  // namespace kvtier::device
