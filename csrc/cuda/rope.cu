// RoPE shift: K rotated by a difference of positions, in place or on its way from stored blocks.
#include "numbers.h"
#include "rope_args.h"

namespace kvtier::device {

constexpr int kPiecesInFlight = 2;  // of a thread; two octets each

/// Sixteen elements of a run, in two octets.
struct RopePiece {
  std::uint64_t paged[2];
  std::uint64_t stored[2];
  const Vector16* units;  // of the piece's eight pairs; null if it is not rotated
  bool inside[2];
};

template <int kElementBytes, bool kIsNeox>
KVTIER_DEVICE RopePiece locate_piece(const RopeArgs& arguments, std::uint32_t index) {
  const std::uint32_t run = arguments.pieces.quotient(index);
  const std::uint32_t row_index = arguments.cols.quotient(run);
  const std::uint32_t plane_index = arguments.rows.quotient(row_index);
  const std::uint32_t page = arguments.plane_count.quotient(plane_index);
  const std::uint32_t piece = index - run * arguments.pieces.divisor;
  const std::int64_t col = run - row_index * arguments.cols.divisor;
  const std::int64_t row = row_index - plane_index * arguments.rows.divisor;
  const std::uint32_t plane = plane_index - page * arguments.plane_count.divisor;
  const PageEntry entry = arguments.pages[page];
  const std::int64_t paged_offset =
      entry.paged_offset + row * arguments.row_stride + col * arguments.col_stride;
  const std::int64_t stored_offset = plane * arguments.stored_plane_stride +
                                     row * arguments.stored_row_stride +
                                     col * arguments.stored_col_stride;
  const std::uint64_t paged = arguments.planes[plane] + static_cast<std::uint64_t>(paged_offset);
  const std::uint64_t stored = entry.stored_address + static_cast<std::uint64_t>(stored_offset);

  const std::uint32_t rotated = arguments.rotary_elements / (2 * kOctet);  // pieces
  const bool is_rotated = piece < rotated;
  const bool is_split = is_rotated && kIsNeox;
  const std::uint32_t octets[2] = {is_split ? piece : 2 * piece,
                                   is_split ? piece + rotated : 2 * piece + 1};
  RopePiece place;
  KVTIER_UNROLL
  for (int i = 0; i < 2; ++i) {
    const std::uint64_t offset = static_cast<std::uint64_t>(octets[i]) * (kOctet * kElementBytes);
    place.paged[i] = paged + offset;
    place.stored[i] = stored + offset;
    place.inside[i] = octets[i] < arguments.run_elements / kOctet;
  }
  place.units = nullptr;
  if (is_rotated) {
    const std::uint32_t unit = arguments.page_units == nullptr ? 0 : arguments.page_units[page];
    const std::uint64_t pair =
        static_cast<std::uint64_t>(unit) * (arguments.rotary_elements / 2) + piece * kOctet;
    place.units = reinterpret_cast<const Vector16*>(arguments.units + pair * 2);
  }
  return place;
}

/// Rotates the pair (x, y) by the pair's unit, two of which are in a vector.
KVTIER_DEVICE void rotate(const Vector16& units, int which, float& x, float& y) {
  const float cosine = float_of(units.words[2 * which]);
  const float sine = float_of(units.words[2 * which + 1]);
  const float turned = subtract(multiply(x, cosine), multiply(y, sine));
  y = add(multiply(y, cosine), multiply(x, sine));
  x = turned;
}

/// Thread t takes pieces t, t + all threads, ...: those of a run first, then of the next head.
template <int kElementBytes, bool kIsNeox>
KVTIER_DEVICE void rope_shift(const RopeArgs& arguments) {
  const std::uint64_t step = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t first = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       first < arguments.total; first += step * kPiecesInFlight) {
    RopePiece pieces[kPiecesInFlight];
    Octet<kElementBytes> octets[kPiecesInFlight][2];
    KVTIER_UNROLL
    for (int i = 0; i < kPiecesInFlight; ++i) {
      const std::uint64_t index = first + i * step;
      const bool inside = index < arguments.total;
      pieces[i] = locate_piece<kElementBytes, kIsNeox>(
          arguments, inside ? static_cast<std::uint32_t>(index) : arguments.total - 1);
      KVTIER_UNROLL
      for (int j = 0; j < 2; ++j) pieces[i].inside[j] = pieces[i].inside[j] && inside;
    }
    KVTIER_UNROLL
    for (int i = 0; i < kPiecesInFlight; ++i) {
      KVTIER_UNROLL
      for (int j = 0; j < 2; ++j) {
        if (pieces[i].inside[j]) {
          octets[i][j] = load_octet<kElementBytes>(arguments.is_from_stored ? pieces[i].stored[j]
                                                                            : pieces[i].paged[j]);
        }
      }
    }
    KVTIER_UNROLL
    for (int i = 0; i < kPiecesInFlight; ++i) {
      if (pieces[i].units != nullptr && pieces[i].inside[0]) {
        float a[kOctet];
        float b[kOctet];
        unpack(octets[i][0], arguments.element, a);
        unpack(octets[i][1], arguments.element, b);
        KVTIER_UNROLL
        for (int j = 0; j < 4; ++j) {
          // Read again for each row of each head, by the ordinary way: they stay in L1.
          const Vector16 units = pieces[i].units[j];
          if constexpr (kIsNeox) {
            rotate(units, 0, a[2 * j], b[2 * j]);
            rotate(units, 1, a[2 * j + 1], b[2 * j + 1]);
          } else {
            float (&half)[kOctet] = j < 2 ? a : b;
            const int at = j % 2 * 4;
            rotate(units, 0, half[at], half[at + 1]);
            rotate(units, 1, half[at + 2], half[at + 3]);
          }
        }
        pack(a, arguments.element, octets[i][0]);
        pack(b, arguments.element, octets[i][1]);
      }
      KVTIER_UNROLL
      for (int j = 0; j < 2; ++j) {
        if (pieces[i].inside[j]) store_octet(pieces[i].paged[j], octets[i][j]);
      }
    }
  }
}

}  // namespace kvtier::device

#define KVTIER_ROPE_KERNEL(name, kIsNeox)                                                    \
  extern "C" __global__ void __launch_bounds__(kvtier::device::kRopeThreads)                 \
      kvtier_rope_shift_##name(const __grid_constant__ kvtier::device::RopeArgs arguments) { \
    if (arguments.element == kvtier::device::ElementType::kFloat32) {                        \
      kvtier::device::rope_shift<4, kIsNeox>(arguments);                                     \
    } else {                                                                                 \
      kvtier::device::rope_shift<2, kIsNeox>(arguments);                                     \
    }                                                                                        \
  }

KVTIER_ROPE_KERNEL(neox, true)
KVTIER_ROPE_KERNEL(interleaved, false)
