// What the quantising kernels share: a group's parameters, codes, and where everything lies.
#pragma once

#include "numbers.h"
#include "quantise_args.h"

namespace kvtier::device {

// ------------------------------------------------------------------------- ranges, codes, values

/// The least and greatest value of a group so far; of none yet.
struct Range {
  float low = float_of(0x7f800000u);   // infinity
  float high = float_of(0xff800000u);  // the negative one

  KVTIER_DEVICE void take(float value) {
    low = lesser(low, value);
    high = greater(high, value);
  }
};

/// A group's parameters as numbers.
struct Parameters {
  float scale;
  float zero;
};

KVTIER_DEVICE Parameters parameters_of(std::uint32_t pair) {
  return {half_value(pair & 0xffffu), half_value(pair >> 16)};
}

/// The stored pair of a group: scale below, zero above.
KVTIER_DEVICE std::uint32_t pair_of(const Range& range, float inverse_largest) {
  const bool is_empty = range.low > range.high;
  const float low = is_empty ? 0.0f : greater(lesser(range.low, kLargestHalf), -kLargestHalf);
  const float high = is_empty ? 0.0f : greater(lesser(range.high, kLargestHalf), -kLargestHalf);
  std::uint32_t zero = half_bits(low);
  if (zero == 0x8000u) zero = 0;
  const float span = subtract(high, half_value(zero));
  const std::uint32_t scale = span > 0.0f ? half_bits(multiply(span, inverse_largest)) : 0;
  return zero << 16 | scale;
}

/// What turns a group's values into codes; 0 gives code 0 to all.
KVTIER_DEVICE float inverse_of(const Parameters& parameters) {
  return parameters.scale > 0.0f ? reciprocal(parameters.scale) : 0.0f;
}

// From here up a float's last bit is 1, so a sum with it rounds to an integer, ties to even, which
// is then in the lowest bits; and back.
constexpr float kIntegers = 8388608.0f;

KVTIER_DEVICE std::uint32_t code_of(float value, float zero, float inverse, float largest_code,
                                    std::uint32_t mask) {
  const float place = multiply(subtract(value, zero), inverse);
  // A NaN is 0 after the first of both.
  return bits_of(add(lesser(greater(place, 0.0f), largest_code), kIntegers)) & mask;
}

KVTIER_DEVICE float value_of(std::uint32_t code, const Parameters& parameters) {
  const float number = subtract(float_of(bits_of(kIntegers) | code), kIntegers);
  return lesser(add(multiply(number, parameters.scale), parameters.zero), kLargestHalf);
}

template <int kBits>
constexpr std::uint32_t kMask = (1u << kBits) - 1;
template <int kBits>
constexpr float kLargestCode = static_cast<float>(kMask<kBits>);
template <int kBits>
constexpr float kInverseLargest = 1.0f / kLargestCode<kBits>;
/// The codes of eight elements: as many bytes as a code has bits.
template <int kBits>
using Codes = Vector<kBits>;

template <int kBits>
KVTIER_DEVICE std::uint32_t code_at(Codes<kBits> codes, int i) {
  return static_cast<std::uint32_t>(codes >> (i * kBits)) & kMask<kBits>;
}

// ------------------------------------------------------------------------------------- geometry

/// Eight elements (token axis), or those of all tokens of a group (channel axis).
struct OctetPlace {
  std::uint64_t paged;  // of the line's first row
  std::uint64_t tile;   // on the stored side
  std::uint32_t plane;
  std::uint32_t line;  // token axis: the row; channel axis: the group of rows
  std::uint32_t col;
  std::uint32_t octet;
};

/// Completes the place of an octet: the addresses, from what it is of.
template <int kElementBytes>
KVTIER_DEVICE void place_octet(const QuantiseArgs& arguments, const PageEntry& entry,
                               std::uint32_t line_rows, OctetPlace& place) {
  const std::int64_t row = static_cast<std::int64_t>(place.line) * line_rows;
  const std::int64_t offset = entry.paged_offset + row * arguments.row_stride +
                              static_cast<std::int64_t>(place.col) * arguments.col_stride +
                              static_cast<std::int64_t>(place.octet) * (kOctet * kElementBytes);
  place.paged = arguments.planes[place.plane] + static_cast<std::uint64_t>(offset);
  const std::int64_t plane_offset = place.plane * arguments.stored_plane_stride;
  place.tile = entry.stored_address + static_cast<std::uint64_t>(plane_offset);
}

/// @param line_rows  rows of a line: 1 on the token axis
template <int kElementBytes>
KVTIER_DEVICE OctetPlace locate(const QuantiseArgs& arguments, std::uint32_t index,
                                std::uint32_t line_rows) {
  const std::uint32_t run = arguments.octets.quotient(index);
  const std::uint32_t line_index = arguments.heads.quotient(run);
  const std::uint32_t plane_index = arguments.lines.quotient(line_index);
  const std::uint32_t page = arguments.plane_count.quotient(plane_index);
  OctetPlace place;
  place.octet = index - run * arguments.octets.divisor;
  place.col = run - line_index * arguments.heads.divisor;
  place.line = line_index - plane_index * arguments.lines.divisor;
  place.plane = plane_index - page * arguments.plane_count.divisor;
  place_octet<kElementBytes>(arguments, arguments.pages[page], line_rows, place);
  return place;
}

/// Where the codes of one octet lie.
template <int kBits>
KVTIER_DEVICE Codes<kBits>* codes_at(const QuantiseArgs& arguments, const OctetPlace& place,
                                     std::uint32_t row) {
  const std::uint64_t run = static_cast<std::uint64_t>(row) * arguments.cols + place.col;
  const std::uint64_t octet = run * (arguments.run_elements / kOctet) + place.octet;
  return reinterpret_cast<Codes<kBits>*>(place.tile + octet * kBits);
}

// ---------------------------------------------------------------------------------- channel axis

/// Where the eight parameters of an octet's channels lie: 32 bytes.
KVTIER_DEVICE Vector16* channel_pairs_at(const QuantiseArgs& arguments, const OctetPlace& place) {
  const std::uint32_t octets = arguments.run_elements / kOctet;
  const std::uint64_t octet =
      (static_cast<std::uint64_t>(place.line) * arguments.cols + place.col) * octets + place.octet;
  return reinterpret_cast<Vector16*>(place.tile + arguments.parameters_offset + octet * 32);
}

/// Tokens of a group that begins at `first_row`: fewer in the last group of a page.
KVTIER_DEVICE std::uint32_t rows_of_group(const QuantiseArgs& arguments, std::uint32_t first_row) {
  const std::uint32_t left = arguments.rows - first_row;
  return left < arguments.group_rows ? left : arguments.group_rows;
}

/// Rows that a thread holds: 64 registers of them, more bytes in flight than any memory asks for.
template <int kElementBytes>
constexpr int kHeldRows = 32 / kElementBytes;

/// Reads up to kHeldRows rows from `first` on, all of them in flight at once.
template <int kElementBytes>
KVTIER_DEVICE void load_rows(const QuantiseArgs& arguments, std::uint64_t paged,
                             std::uint32_t first, std::uint32_t row_count,
                             Octet<kElementBytes> (&held)[kHeldRows<kElementBytes>]) {
  KVTIER_UNROLL
  for (int i = 0; i < kHeldRows<kElementBytes>; ++i) {
    const std::uint32_t row = first + static_cast<std::uint32_t>(i);
    if (row < row_count) {
      held[i] =
          load_octet<kElementBytes>(paged + static_cast<std::uint64_t>(row * arguments.row_stride));
    }
  }
}

}  // namespace kvtier::device
