// Quantisation of K by channel to 2 bits, and 4 for the channels that need them.
//
// As quantise.cu's channel axis. The two bits more of a head's boosted channels are dense, four
// channels a byte, and these four may be any threads': so whole heads go to a warp, whose lanes
// exchange them. Lanes without a head take part in the exchange alone.
#include "quantise.h"

namespace kvtier::device {

constexpr float kLargestBoosted = 15.0f;

/// What a lane has to do: an octet, and in exchange perhaps a byte of boost codes.
struct BoostedPlace {
  OctetPlace octet;
  bool is_active;       // it has an octet
  bool has_byte;        // of the lane's number within the head
  std::uint32_t first;  // lane of the head's first octet
  std::uint32_t mask;   // of the octet's boosted channels
  std::uint32_t rank;   // of the first of them
};

template <int kElementBytes>
KVTIER_DEVICE BoostedPlace locate_boosted(const QuantiseArgs& arguments, std::uint32_t index) {
  const std::uint32_t octets = arguments.octets.divisor;
  const std::uint32_t lane = index % kWarpLanes;
  const std::uint32_t warp = index / kWarpLanes;
  const std::uint32_t line_index = arguments.heads.quotient(warp);
  const std::uint32_t plane_index = arguments.lines.quotient(line_index);
  const std::uint32_t page = arguments.plane_count.quotient(plane_index);
  const std::uint32_t heads_of_warp = arguments.octets.quotient(kWarpLanes);
  const std::uint32_t head = arguments.octets.quotient(lane);
  BoostedPlace place;
  place.first = head * octets;
  place.octet.octet = lane - place.first;
  place.octet.col = (warp - line_index * arguments.heads.divisor) * heads_of_warp + head;
  place.octet.line = line_index - plane_index * arguments.lines.divisor;
  place.octet.plane = plane_index - page * arguments.plane_count.divisor;
  place.is_active = head < heads_of_warp && place.octet.col < arguments.cols;
  place.has_byte = place.is_active && place.octet.octet < arguments.boosted / 4;
  place.mask = 0;
  place.rank = 0;
  if (place.is_active) {
    const PageEntry entry = arguments.pages[page];
    place_octet<kElementBytes>(arguments, entry, arguments.group_rows, place.octet);
    const std::uint32_t head_index = place.octet.plane * arguments.cols + place.octet.col;
    const std::uint32_t boost = arguments.boost_octets[head_index * octets + place.octet.octet];
    place.mask = boost & 0xffu;
    place.rank = boost >> 8;
  }
  return place;
}

/// Where the lane's byte of boost codes lies.
KVTIER_DEVICE std::uint8_t* boost_byte_at(const QuantiseArgs& arguments, const OctetPlace& place,
                                          std::uint32_t row) {
  const std::uint64_t run = static_cast<std::uint64_t>(row) * arguments.cols + place.col;
  return reinterpret_cast<std::uint8_t*>(place.tile + arguments.boost_offset +
                                         run * (arguments.boosted / 4) + place.octet);
}

template <int kElementBytes>
KVTIER_DEVICE void quantise_boosted(const QuantiseArgs& arguments) {
  constexpr int kHeld = kHeldRows<kElementBytes>;
  const std::uint64_t step = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t index = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       index < arguments.total; index += step) {
    const BoostedPlace place =
        locate_boosted<kElementBytes>(arguments, static_cast<std::uint32_t>(index));
    const std::uint32_t first_row = place.octet.line * arguments.group_rows;
    const std::uint32_t row_count = rows_of_group(arguments, first_row);
    const std::uint32_t held_count = place.is_active ? row_count : 0;

    // The four channels of this lane's byte: whose lanes have their codes, and where.
    std::uint32_t lanes[4] = {0, 0, 0, 0};
    std::uint32_t shifts[4] = {0, 0, 0, 0};
    if (place.has_byte) {
      const std::uint32_t head_index = place.octet.plane * arguments.cols + place.octet.col;
      const std::uint8_t* const channels =
          arguments.boost_channels + head_index * arguments.boosted + place.octet.octet * 4;
      KVTIER_UNROLL
      for (int i = 0; i < 4; ++i) {
        lanes[i] = place.first + channels[i] / kOctet;
        shifts[i] = channels[i] % kOctet * 2;
      }
    }

    Octet<kElementBytes> held[kHeld] = {};
    Range ranges[kOctet];
    for (std::uint32_t first = 0; first < held_count; first += kHeld) {
      load_rows(arguments, place.octet.paged, first, held_count, held);
      KVTIER_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        if (first + static_cast<std::uint32_t>(i) >= held_count) break;
        float values[kOctet];
        unpack(held[i], arguments.element, values);
        KVTIER_UNROLL
        for (int j = 0; j < 8; ++j) ranges[j].take(values[j]);
      }
    }
    Vector16 pairs[2];
    float zeros[kOctet];
    float inverses[kOctet];
    KVTIER_UNROLL
    for (int j = 0; j < 8; ++j) {
      const bool is_boosted = place.mask >> j & 1u;
      const std::uint32_t pair =
          pair_of(ranges[j], is_boosted ? 1.0f / kLargestBoosted : kInverseLargest<2>);
      const Parameters parameters = parameters_of(pair);
      pairs[j / 4].words[j % 4] = pair;
      zeros[j] = parameters.zero;
      inverses[j] = inverse_of(parameters);
    }
    if (place.is_active) {
      Vector16* const pairs_target = channel_pairs_at(arguments, place.octet);
      store_streaming(pairs_target, pairs[0]);
      store_streaming(pairs_target + 1, pairs[1]);
    }
    for (std::uint32_t first = 0; first < row_count; first += kHeld) {
      if (row_count > kHeld) load_rows(arguments, place.octet.paged, first, held_count, held);
      KVTIER_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const std::uint32_t row = first + static_cast<std::uint32_t>(i);
        if (row >= row_count) break;
        float values[kOctet];
        unpack(held[i], arguments.element, values);
        std::uint32_t codes = 0;
        std::uint32_t boosts = 0;  // the lower two bits, at the channel's place in the octet
        KVTIER_UNROLL
        for (int j = 0; j < 8; ++j) {
          const bool is_boosted = place.mask >> j & 1u;
          const float largest = is_boosted ? kLargestBoosted : kLargestCode<2>;
          const std::uint32_t code = code_of(values[j], zeros[j], inverses[j], largest, 15u);
          codes |= (is_boosted ? code >> 2 : code) << (2 * j);
          boosts |= (code & 3u) << (2 * j);
        }
        std::uint32_t byte = 0;
        KVTIER_UNROLL
        for (int k = 0; k < 4; ++k) {
          const std::uint32_t theirs = __shfl_sync(0xffffffffu, boosts, static_cast<int>(lanes[k]));
          byte |= (theirs >> shifts[k] & 3u) << (2 * k);
        }
        if (place.is_active) {
          store_streaming(codes_at<2>(arguments, place.octet, first_row + row),
                          static_cast<std::uint16_t>(codes));
        }
        if (place.has_byte) {
          store_streaming(boost_byte_at(arguments, place.octet, first_row + row),
                          static_cast<std::uint8_t>(byte));
        }
      }
    }
  }
}

template <int kElementBytes>
KVTIER_DEVICE void dequantise_boosted(const QuantiseArgs& arguments) {
  constexpr int kHeld = 8;
  const std::uint64_t step = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t index = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       index < arguments.total; index += step) {
    const BoostedPlace place =
        locate_boosted<kElementBytes>(arguments, static_cast<std::uint32_t>(index));
    const std::uint32_t first_row = place.octet.line * arguments.group_rows;
    const std::uint32_t row_count = rows_of_group(arguments, first_row);
    Parameters parameters[kOctet] = {};
    if (place.is_active) {
      const Vector16* const pairs_source = channel_pairs_at(arguments, place.octet);
      const Vector16 pairs[2] = {load_streaming(pairs_source), load_streaming(pairs_source + 1)};
      KVTIER_UNROLL
      for (int j = 0; j < 8; ++j) parameters[j] = parameters_of(pairs[j / 4].words[j % 4]);
    }
    const std::uint32_t window_lane = place.first + place.rank / 4;
    for (std::uint32_t first = 0; first < row_count; first += kHeld) {
      std::uint32_t codes[kHeld];
      std::uint32_t bytes[kHeld];
      KVTIER_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const std::uint32_t row = first + static_cast<std::uint32_t>(i);
        codes[i] = 0;
        bytes[i] = 0;
        if (row < row_count && place.is_active) {
          codes[i] = load_streaming(codes_at<2>(arguments, place.octet, first_row + row));
        }
        if (row < row_count && place.has_byte) {
          bytes[i] = load_streaming(boost_byte_at(arguments, place.octet, first_row + row));
        }
      }
      KVTIER_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const std::uint32_t row = first + static_cast<std::uint32_t>(i);
        if (row >= row_count) break;
        // Up to eight boost codes from `rank` on lie in three bytes; lanes beyond the head's bytes
        // give what no channel takes.
        std::uint32_t window = 0;
        KVTIER_UNROLL
        for (std::uint32_t k = 0; k < 3; ++k) {
          const auto lane = static_cast<int>((window_lane + k) % kWarpLanes);
          window |= __shfl_sync(0xffffffffu, bytes[i], lane) << (8 * k);
        }
        window >>= place.rank % 4 * 2;
        if (!place.is_active) continue;
        float values[kOctet];
        KVTIER_UNROLL
        for (int j = 0; j < 8; ++j) {
          const std::uint32_t base = codes[i] >> (2 * j) & 3u;
          const bool is_boosted = place.mask >> j & 1u;
          values[j] = value_of(is_boosted ? base << 2 | (window & 3u) : base, parameters[j]);
          window >>= is_boosted ? 2 : 0;
        }
        Octet<kElementBytes> octet;
        pack(values, arguments.element, octet);
        store_octet(place.octet.paged + static_cast<std::uint64_t>(row * arguments.row_stride),
                    octet);
      }
    }
  }
}

}  // namespace kvtier::device

#define KVTIER_BOOSTED_KERNEL(name, body)                                                    \
  extern "C" __global__ void __launch_bounds__(kvtier::device::kQuantiseThreads)             \
      kvtier_##name##_k2x2(const __grid_constant__ kvtier::device::QuantiseArgs arguments) { \
    if (arguments.element == kvtier::device::ElementType::kFloat32) {                        \
      kvtier::device::body<4>(arguments);                                                    \
    } else {                                                                                 \
      kvtier::device::body<2>(arguments);                                                    \
    }                                                                                        \
  }

KVTIER_BOOSTED_KERNEL(quantise, quantise_boosted)
KVTIER_BOOSTED_KERNEL(dequantise, dequantise_boosted)
