// What host and device share: fixed-width integers, divisions by invariants, arguments of kernels.
//
// One source for nvcc, NVRTC and g++ (the core and the simulator), so nothing here includes a
// header that NVRTC lacks.
#pragma once

#if defined(__CUDACC_RTC__)
namespace std {
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
}  // namespace std
#else
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define KVTIER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVTIER_HOST_DEVICE inline
#endif

namespace kvtier::device {

/// Division of n < 2^31 by an invariant of 1 up to 2^31 - 1: one multiplication and a shift.
///
/// With l = ceil(log2 d): multiplier = ceil(2^(31 + l) / d) fits 32 bits, and the quotient is
/// (n * multiplier) >> (31 + l), after Granlund and Montgomery (1994). d = 1 has multiplier 0.
struct FastDiv {
  std::uint32_t divisor;
  std::uint32_t multiplier;
  std::uint32_t shift;  // beyond 32

  KVTIER_HOST_DEVICE std::uint32_t quotient(std::uint32_t n) const {
    if (divisor == 1) return n;
#if defined(__CUDA_ARCH__)
    return __umulhi(n, multiplier) >> shift;
#else
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(n) * multiplier) >> 32) >> shift;
#endif
  }
};

#if !defined(__CUDACC_RTC__)
/// @param divisor  1 up to 2^31 - 1
inline FastDiv make_fast_div(std::uint32_t divisor) {
  if (divisor == 1) return {1, 0, 0};
  std::uint32_t log2_up = 0;
  while ((std::uint64_t{1} << log2_up) < divisor) ++log2_up;
  const std::uint64_t power = std::uint64_t{1} << (31 + log2_up);
  return {divisor, static_cast<std::uint32_t>((power + divisor - 1) / divisor), log2_up - 1};
}
#endif

/// One page to copy: where it lies in every plane, and where its block begins on the stored side.
struct PageEntry {
  std::int64_t paged_offset;
  std::uint64_t stored_address;
};

/// One launch of a copy kernel. Byte x of (page i, plane p, row t, column h) lies on the paged side
/// at planes[p] + pages[i].paged_offset + t * row_stride + h * col_stride + x, and on the stored
/// side at pages[i].stored_address + p * stored_plane_stride + t * stored_row_stride
/// + h * stored_col_stride + x. All addresses, strides and the run are multiples of the vector.
struct CopyArgs {
  const std::uint64_t* planes;  // device memory: the planes of this launch
  const PageEntry* pages;       // device memory
  std::int64_t row_stride;
  std::int64_t col_stride;
  std::int64_t stored_plane_stride;
  std::int64_t stored_row_stride;
  std::int64_t stored_col_stride;
  std::uint32_t total;      // vectors of this launch, below 2^31 (bulk kernels: runs)
  std::uint32_t run_bytes;  // of one (row, column): what bulk kernels move at once
  FastDiv vectors;          // of a run; 1 for bulk kernels
  FastDiv cols;
  FastDiv rows;
  FastDiv plane_count;  // innermost to outermost; pages are what is left
};

}  // namespace kvtier::device
