// Elements of KV as fp32 numbers, eight at a time: what quantise and RoPE stand on.
//
// A GPU converts by instructions, which give the bits that device.h's written out conversions give;
// only a NaN's payload may differ, and all NaNs are one to the kernels that use this.
#pragma once

#include "device.h"
#include "elements.h"

namespace kvtier::device {

#if defined(__CUDA_ARCH__)

KVTIER_DEVICE float reciprocal(float value) { return __frcp_rn(value); }
/// The lesser of both; the number if one is a NaN. Which zero is the lesser is not said.
KVTIER_DEVICE float lesser(float a, float b) { return fminf(a, b); }
KVTIER_DEVICE float greater(float a, float b) { return fmaxf(a, b); }

KVTIER_DEVICE std::uint32_t half_bits(float value) {
  std::uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
KVTIER_DEVICE float half_value(std::uint32_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<std::uint16_t>(half)));
  return value;
}
/// Both rounded to nearest even, `low` in the lower half of the word.
KVTIER_DEVICE std::uint32_t two_halves(float low, float high) {
  std::uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
KVTIER_DEVICE std::uint32_t two_bfloats(float low, float high) {
  std::uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

#else

KVTIER_DEVICE float reciprocal(float value) { return divide(1.0f, value); }
/// The lesser of both; the number if one is a NaN. Which zero is the lesser is not said.
KVTIER_DEVICE float lesser(float a, float b) { return a != a || b < a ? b : a; }
KVTIER_DEVICE float greater(float a, float b) { return a != a || b > a ? b : a; }

KVTIER_DEVICE std::uint32_t half_bits(float value) { return fp16_of_float(value); }
KVTIER_DEVICE float half_value(std::uint32_t half) {
  return float_of_fp16(static_cast<std::uint16_t>(half));
}
/// Both rounded to nearest even, `low` in the lower half of the word.
KVTIER_DEVICE std::uint32_t two_halves(float low, float high) {
  return fp16_of_float(low) | static_cast<std::uint32_t>(fp16_of_float(high)) << 16;
}
KVTIER_DEVICE std::uint32_t two_bfloats(float low, float high) {
  return bf16_of_float(low) | static_cast<std::uint32_t>(bf16_of_float(high)) << 16;
}

#endif

/// Eight consecutive elements as they lie in memory, at a multiple of 16 bytes.
template <int kElementBytes>
struct Octet {
  Vector16 vectors[kElementBytes / 2];
};

template <int kElementBytes>
KVTIER_DEVICE Octet<kElementBytes> load_octet(std::uint64_t address) {
  Octet<kElementBytes> octet;
  const auto* vectors = reinterpret_cast<const Vector16*>(address);
  KVTIER_UNROLL
  for (int i = 0; i < kElementBytes / 2; ++i) octet.vectors[i] = load_streaming(vectors + i);
  return octet;
}

template <int kElementBytes>
KVTIER_DEVICE void store_octet(std::uint64_t address, const Octet<kElementBytes>& octet) {
  auto* vectors = reinterpret_cast<Vector16*>(address);
  KVTIER_UNROLL
  for (int i = 0; i < kElementBytes / 2; ++i) store_streaming(vectors + i, octet.vectors[i]);
}

/// The elements' values, exactly. `element` is one for a whole launch, so that its branch costs a
/// test for eight elements and is taken by all threads alike.
KVTIER_DEVICE void unpack(const Octet<2>& octet, ElementType element, float (&values)[kOctet]) {
  if (element == ElementType::kBfloat16) {
    KVTIER_UNROLL
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t word = octet.vectors[0].words[i];
      values[2 * i] = float_of(word << 16);
      values[2 * i + 1] = float_of(word & 0xffff0000u);
    }
  } else {
    KVTIER_UNROLL
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t word = octet.vectors[0].words[i];
      values[2 * i] = half_value(word & 0xffffu);
      values[2 * i + 1] = half_value(word >> 16);
    }
  }
}

KVTIER_DEVICE void unpack(const Octet<4>& octet, ElementType, float (&values)[kOctet]) {
  KVTIER_UNROLL
  for (int i = 0; i < 8; ++i) values[i] = float_of(octet.vectors[i / 4].words[i % 4]);
}

/// The values rounded to the nearest elements, ties to even.
KVTIER_DEVICE void pack(const float (&values)[kOctet], ElementType element, Octet<2>& octet) {
  if (element == ElementType::kBfloat16) {
    KVTIER_UNROLL
    for (int i = 0; i < 4; ++i) {
      octet.vectors[0].words[i] = two_bfloats(values[2 * i], values[2 * i + 1]);
    }
  } else {
    KVTIER_UNROLL
    for (int i = 0; i < 4; ++i) {
      octet.vectors[0].words[i] = two_halves(values[2 * i], values[2 * i + 1]);
    }
  }
}

KVTIER_DEVICE void pack(const float (&values)[kOctet], ElementType, Octet<4>& octet) {
  KVTIER_UNROLL
  for (int i = 0; i < 8; ++i) octet.vectors[i / 4].words[i % 4] = bits_of(values[i]);
}

}  // namespace kvtier::device
