// Quantisation of KV by groups, fused with gather, and its way back, fused with scatter.
//
// What is stored and how it is computed, to the bit, stands in quantise_args.h. Token axis: lanes
// of a warp share a group and exchange its range. Channel axis: a thread sees all tokens of its
// eight channels, so nothing is exchanged, and what it read for the range it keeps in registers for
// the codes. A kernel serves all three element types: 2 and 4 byte ones by two bodies.
#include "quantise.h"

namespace kvtier::device {

// ------------------------------------------------------------------------------------ token axis

constexpr int kOctetsInFlight = 4;  // of a thread

/// Where the parameters of an octet's group lie.
KVTIER_DEVICE std::uint32_t* token_pair_at(const QuantiseArgs& arguments, const OctetPlace& place) {
  const std::uint32_t run = place.line * arguments.cols + place.col;
  const std::uint32_t octet = run * arguments.octets.divisor + place.octet;  // of whole groups
  return reinterpret_cast<std::uint32_t*>(place.tile + arguments.parameters_offset) +
         (octet >> arguments.group_shift);
}

/// Lane l of a warp takes octet l of 32 consecutive ones, four such warpfuls at a time, each a grid
/// apart. Groups are 4, 8, 16 or 32 octets and never lie across warps.
template <int kBits, int kElementBytes>
KVTIER_DEVICE void quantise_token(const QuantiseArgs& arguments) {
  const std::uint32_t octets = arguments.run_elements / kOctet;
  const std::uint64_t step = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  // Counted by the warp's first octet, the same for all of its lanes.
  for (std::uint64_t warp_first = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x +
                                  threadIdx.x / kWarpLanes * kWarpLanes;
       warp_first < arguments.total; warp_first += step * kOctetsInFlight) {
    OctetPlace places[kOctetsInFlight];
    bool inside[kOctetsInFlight];
    Octet<kElementBytes> loaded[kOctetsInFlight];
    KVTIER_UNROLL
    for (int i = 0; i < kOctetsInFlight; ++i) {
      const std::uint64_t index = warp_first + i * step + threadIdx.x % kWarpLanes;
      inside[i] = index < arguments.total;
      places[i] = locate<kElementBytes>(
          arguments, inside[i] ? static_cast<std::uint32_t>(index) : arguments.total - 1, 1);
      inside[i] = inside[i] && places[i].octet < octets;
    }
    KVTIER_UNROLL
    for (int i = 0; i < kOctetsInFlight; ++i) {
      if (inside[i]) loaded[i] = load_octet<kElementBytes>(places[i].paged);
    }
    KVTIER_UNROLL
    for (int i = 0; i < kOctetsInFlight; ++i) {
      if (warp_first + i * step >= arguments.total) break;  // all of the warp, or none
      float values[kOctet];
      Range range;
      if (inside[i]) {
        unpack(loaded[i], arguments.element, values);
        KVTIER_UNROLL
        for (int j = 0; j < 8; ++j) range.take(values[j]);
      }
      for (std::uint32_t distance = 1u << arguments.group_shift; distance >>= 1;) {
        const float low = __shfl_xor_sync(0xffffffffu, range.low, static_cast<int>(distance));
        const float high = __shfl_xor_sync(0xffffffffu, range.high, static_cast<int>(distance));
        range.low = lesser(range.low, low);
        range.high = greater(range.high, high);
      }
      if (!inside[i]) continue;
      const std::uint32_t pair = pair_of(range, kInverseLargest<kBits>);
      const Parameters parameters = parameters_of(pair);
      const float inverse = inverse_of(parameters);
      Codes<kBits> codes = 0;
      KVTIER_UNROLL
      for (int j = 0; j < 8; ++j) {
        const std::uint32_t code =
            code_of(values[j], parameters.zero, inverse, kLargestCode<kBits>, kMask<kBits>);
        codes = static_cast<Codes<kBits>>(codes | static_cast<Codes<kBits>>(code) << (j * kBits));
      }
      store_streaming(codes_at<kBits>(arguments, places[i], places[i].line), codes);
      if ((places[i].octet & ((1u << arguments.group_shift) - 1)) == 0) {
        store_streaming(token_pair_at(arguments, places[i]), pair);
      }
    }
  }
}

template <int kBits, int kElementBytes>
KVTIER_DEVICE void dequantise_token(const QuantiseArgs& arguments) {
  const std::uint32_t octets = arguments.run_elements / kOctet;
  const std::uint64_t step = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t first = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       first < arguments.total; first += step * kOctetsInFlight) {
    OctetPlace places[kOctetsInFlight];
    bool inside[kOctetsInFlight];
    Codes<kBits> codes[kOctetsInFlight];
    std::uint32_t pairs[kOctetsInFlight];
    KVTIER_UNROLL
    for (int i = 0; i < kOctetsInFlight; ++i) {
      const std::uint64_t index = first + i * step;
      inside[i] = index < arguments.total;
      places[i] = locate<kElementBytes>(
          arguments, inside[i] ? static_cast<std::uint32_t>(index) : arguments.total - 1, 1);
      inside[i] = inside[i] && places[i].octet < octets;
    }
    KVTIER_UNROLL
    for (int i = 0; i < kOctetsInFlight; ++i) {
      if (inside[i]) {
        codes[i] = load_streaming(codes_at<kBits>(arguments, places[i], places[i].line));
        pairs[i] = load_streaming(token_pair_at(arguments, places[i]));
      }
    }
    KVTIER_UNROLL
    for (int i = 0; i < kOctetsInFlight; ++i) {
      if (!inside[i]) continue;
      const Parameters parameters = parameters_of(pairs[i]);
      float values[kOctet];
      KVTIER_UNROLL
      for (int j = 0; j < 8; ++j) values[j] = value_of(code_at<kBits>(codes[i], j), parameters);
      Octet<kElementBytes> octet;
      pack(values, arguments.element, octet);
      store_octet(places[i].paged, octet);
    }
  }
}

// ---------------------------------------------------------------------------------- channel axis

/// Thread t takes the octet t: eight channels of all tokens of a group. Neighbours in a warp read
/// and write neighbours in memory, row by row. A group of more rows than a thread holds is read
/// twice, the second time mostly from L2.
template <int kBits, int kElementBytes>
KVTIER_DEVICE void quantise_channel(const QuantiseArgs& arguments) {
  constexpr int kHeld = kHeldRows<kElementBytes>;
  const std::uint64_t step = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t index = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       index < arguments.total; index += step) {
    const OctetPlace place =
        locate<kElementBytes>(arguments, static_cast<std::uint32_t>(index), arguments.group_rows);
    const std::uint32_t first_row = place.line * arguments.group_rows;
    const std::uint32_t row_count = rows_of_group(arguments, first_row);
    Octet<kElementBytes> held[kHeld];
    Range ranges[kOctet];
    for (std::uint32_t first = 0; first < row_count; first += kHeld) {
      load_rows(arguments, place.paged, first, row_count, held);
      KVTIER_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        if (first + static_cast<std::uint32_t>(i) >= row_count) break;
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
      const std::uint32_t pair = pair_of(ranges[j], kInverseLargest<kBits>);
      const Parameters parameters = parameters_of(pair);
      pairs[j / 4].words[j % 4] = pair;
      zeros[j] = parameters.zero;
      inverses[j] = inverse_of(parameters);
    }
    Vector16* const pairs_target = channel_pairs_at(arguments, place);
    store_streaming(pairs_target, pairs[0]);
    store_streaming(pairs_target + 1, pairs[1]);
    for (std::uint32_t first = 0; first < row_count; first += kHeld) {
      if (row_count > kHeld) load_rows(arguments, place.paged, first, row_count, held);
      KVTIER_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const std::uint32_t row = first + static_cast<std::uint32_t>(i);
        if (row >= row_count) break;
        float values[kOctet];
        unpack(held[i], arguments.element, values);
        Codes<kBits> codes = 0;
        KVTIER_UNROLL
        for (int j = 0; j < 8; ++j) {
          const std::uint32_t code =
              code_of(values[j], zeros[j], inverses[j], kLargestCode<kBits>, kMask<kBits>);
          codes = static_cast<Codes<kBits>>(codes | static_cast<Codes<kBits>>(code) << (j * kBits));
        }
        store_streaming(codes_at<kBits>(arguments, place, first_row + row), codes);
      }
    }
  }
}

/// As quantise_channel, the other way; eight rows of codes in flight.
template <int kBits, int kElementBytes>
KVTIER_DEVICE void dequantise_channel(const QuantiseArgs& arguments) {
  constexpr int kHeld = 8;
  const std::uint64_t step = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t index = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       index < arguments.total; index += step) {
    const OctetPlace place =
        locate<kElementBytes>(arguments, static_cast<std::uint32_t>(index), arguments.group_rows);
    const std::uint32_t first_row = place.line * arguments.group_rows;
    const std::uint32_t row_count = rows_of_group(arguments, first_row);
    const Vector16* const pairs_source = channel_pairs_at(arguments, place);
    const Vector16 pairs[2] = {load_streaming(pairs_source), load_streaming(pairs_source + 1)};
    Parameters parameters[kOctet];
    KVTIER_UNROLL
    for (int j = 0; j < 8; ++j) parameters[j] = parameters_of(pairs[j / 4].words[j % 4]);
    for (std::uint32_t first = 0; first < row_count; first += kHeld) {
      Codes<kBits> codes[kHeld];
      KVTIER_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const std::uint32_t row = first + static_cast<std::uint32_t>(i);
        if (row < row_count) {
          codes[i] = load_streaming(codes_at<kBits>(arguments, place, first_row + row));
        }
      }
      KVTIER_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const std::uint32_t row = first + static_cast<std::uint32_t>(i);
        if (row >= row_count) break;
        float values[kOctet];
        KVTIER_UNROLL
        for (int j = 0; j < 8; ++j) {
          values[j] = value_of(code_at<kBits>(codes[i], j), parameters[j]);
        }
        Octet<kElementBytes> octet;
        pack(values, arguments.element, octet);
        store_octet(place.paged + static_cast<std::uint64_t>(row * arguments.row_stride), octet);
      }
    }
  }
}

}  // namespace kvtier::device

#define KVTIER_QUANTISE_KERNEL(name, body, kBits)                                                \
  extern "C" __global__ void __launch_bounds__(kvtier::device::kQuantiseThreads)                 \
      kvtier_##name##_b##kBits(const __grid_constant__ kvtier::device::QuantiseArgs arguments) { \
    if (arguments.element == kvtier::device::ElementType::kFloat32) {                            \
      kvtier::device::body<kBits, 4>(arguments);                                                 \
    } else {                                                                                     \
      kvtier::device::body<kBits, 2>(arguments);                                                 \
    }                                                                                            \
  }
#define KVTIER_QUANTISE_KERNELS(kBits)                                    \
  KVTIER_QUANTISE_KERNEL(quantise_v_per_token, quantise_token, kBits)     \
  KVTIER_QUANTISE_KERNEL(quantise_k_per_channel, quantise_channel, kBits) \
  KVTIER_QUANTISE_KERNEL(dequantise_v_per_token, dequantise_token, kBits) \
  KVTIER_QUANTISE_KERNEL(dequantise_k_per_channel, dequantise_channel, kBits)

KVTIER_QUANTISE_KERNELS(8)
KVTIER_QUANTISE_KERNELS(4)
KVTIER_QUANTISE_KERNELS(2)
