// What the kernels are written with: vectors, streaming access, shared memory, exact numbers.
//
// One source for nvcc, NVRTC and g++ (the simulator), so nothing here includes a header that NVRTC
// lacks. Where CUDA has an instruction that C++ cannot say, the simulator gets plain C++.
#pragma once

#include "types.h"

#if defined(__CUDACC__)
#define KVTIER_DEVICE __device__ __forceinline__
#define KVTIER_UNROLL _Pragma("unroll")
/// The launch's dynamic shared memory as `Type* name`, aligned to 128 bytes.
#define KVTIER_DYNAMIC_SHARED(Type, name)                                 \
  extern __shared__ __align__(128) unsigned char kvtier_dynamic_shared[]; \
  Type* const name = reinterpret_cast<Type*>(kvtier_dynamic_shared)
/// `Type name[count]` of the CTA, not initialised.
#define KVTIER_STATIC_SHARED(Type, name, count) __shared__ Type name[count]
#else
#include "../sim/cuda_sim.h"
#define KVTIER_DEVICE inline
#define KVTIER_UNROLL
#define KVTIER_DYNAMIC_SHARED(Type, name) \
  Type* const name = static_cast<Type*>(::kvtier::sim::place.shared)
#define KVTIER_STATIC_SHARED(Type, name, count) \
  static const char name##_key{};               \
  auto& name = *static_cast<Type(*)[count]>(    \
      ::kvtier::sim::static_shared(&name##_key, sizeof(Type[count]), alignof(Type)))
#endif

namespace kvtier::device {

// ------------------------------------------------------------------------------------- vectors

struct alignas(16) Vector16 {
  std::uint32_t words[4];
};

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<16> {
  using Type = Vector16;
};
template <>
struct VectorOf<8> {
  using Type = std::uint64_t;
};
template <>
struct VectorOf<4> {
  using Type = std::uint32_t;
};
template <>
struct VectorOf<2> {
  using Type = std::uint16_t;
};
template <>
struct VectorOf<1> {
  using Type = std::uint8_t;
};
/// kBytes at once, aligned to kBytes: 16, 8, 4, 2 or 1.
template <int kBytes>
using Vector = typename VectorOf<kBytes>::Type;

#if defined(__CUDA_ARCH__)

/// Read once: past L1, whose lines the engine's kernels need. Never by the read-only path (.nc):
/// another kernel, or the host, may be writing near by.
KVTIER_DEVICE Vector16 load_streaming(const Vector16* source) {
  Vector16 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.words[0]), "=r"(value.words[1]), "=r"(value.words[2]),
                 "=r"(value.words[3])
               : "l"(source)
               : "memory");
  return value;
}
KVTIER_DEVICE std::uint64_t load_streaming(const std::uint64_t* source) {
  std::uint64_t value;
  asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
  return value;
}
KVTIER_DEVICE std::uint32_t load_streaming(const std::uint32_t* source) {
  std::uint32_t value;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}
KVTIER_DEVICE std::uint16_t load_streaming(const std::uint16_t* source) {
  std::uint16_t value;
  asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(value) : "l"(source) : "memory");
  return value;
}
KVTIER_DEVICE std::uint8_t load_streaming(const std::uint8_t* source) {
  std::uint16_t value;  // no constraint names an 8-bit register
  asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=h"(value) : "l"(source) : "memory");
  return static_cast<std::uint8_t>(value);
}

/// Written once and not read again here: first to leave L2.
KVTIER_DEVICE void store_streaming(Vector16* target, const Vector16& value) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(value.words[0]),
               "r"(value.words[1]), "r"(value.words[2]), "r"(value.words[3])
               : "memory");
}
KVTIER_DEVICE void store_streaming(std::uint64_t* target, std::uint64_t value) {
  asm volatile("st.global.cs.u64 [%0], %1;" ::"l"(target), "l"(value) : "memory");
}
KVTIER_DEVICE void store_streaming(std::uint32_t* target, std::uint32_t value) {
  asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}
KVTIER_DEVICE void store_streaming(std::uint16_t* target, std::uint16_t value) {
  asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(target), "h"(value) : "memory");
}
KVTIER_DEVICE void store_streaming(std::uint8_t* target, std::uint8_t value) {
  asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(target), "h"(static_cast<std::uint16_t>(value))
               : "memory");
}

#else

KVTIER_DEVICE void check_access(const void* place, std::size_t nbytes) {
#if !defined(__CUDACC__)
  sim::check_access(place, nbytes);
#else  // nvcc's pass for the host, which never calls it
  (void)place;
  (void)nbytes;
#endif
}

template <typename Value>
KVTIER_DEVICE Value load_streaming(const Value* source) {
  check_access(source, sizeof(Value));
  return *source;
}
template <typename Value>
KVTIER_DEVICE void store_streaming(Value* target, const Value& value) {
  check_access(target, sizeof(Value));
  *target = value;
}

#endif

/// Ends the kernel, and with it the context, with an error: for what would otherwise never end.
KVTIER_DEVICE void stop() {
#if defined(__CUDA_ARCH__)
  __trap();
#elif !defined(__CUDACC__)
  sim::fail("the kernel stopped itself");
#endif
}

// ------------------------------------------------------------------------------------- numbers
// Every operation rounds once, to nearest even, and is never contracted, so that a kernel's result
// is one bit pattern on every architecture, on the simulator and in numpy.

#if defined(__CUDA_ARCH__)

KVTIER_DEVICE std::uint32_t bits_of(float value) { return __float_as_uint(value); }
KVTIER_DEVICE float float_of(std::uint32_t bits) { return __uint_as_float(bits); }
KVTIER_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
KVTIER_DEVICE float subtract(float a, float b) { return __fsub_rn(a, b); }
KVTIER_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
KVTIER_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
/// a * b + c, rounded once.
KVTIER_DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
/// To the nearest integer, halves to even.
KVTIER_DEVICE float round_even(float value) { return rintf(value); }

#else

KVTIER_DEVICE std::uint32_t bits_of(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}
KVTIER_DEVICE float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
KVTIER_DEVICE float add(float a, float b) { return a + b; }
KVTIER_DEVICE float subtract(float a, float b) { return a - b; }
KVTIER_DEVICE float multiply(float a, float b) { return a * b; }
KVTIER_DEVICE float divide(float a, float b) { return a / b; }
/// a * b + c, rounded once.
KVTIER_DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
/// To the nearest integer, halves to even.
KVTIER_DEVICE float round_even(float value) { return __builtin_rintf(value); }

#endif

KVTIER_DEVICE float float_of_bf16(std::uint16_t bits) {
  return float_of(static_cast<std::uint32_t>(bits) << 16);
}

/// Nearest even; a NaN stays a NaN (quiet), with its sign and the top of its payload.
KVTIER_DEVICE std::uint16_t bf16_of_float(float value) {
  const std::uint32_t bits = bits_of(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<std::uint16_t>((is_nan ? bits | 0x00400000u : rounded) >> 16);
}

KVTIER_DEVICE float float_of_fp16(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 31u;
  const std::uint32_t fraction = bits & 0x3ffu;
  // 2^-24 units; not by shifting into a subnormal float, which flush-to-zero would lose
  const float small = multiply(static_cast<float>(fraction), 0x1p-24f);
  const std::uint32_t offset = exponent == 31 ? 224u : 112u;  // of the exponents; to 255 at the top
  const std::uint32_t normal = ((exponent + offset) << 23) | (fraction << 13);
  return float_of(sign | (exponent == 0 ? bits_of(small) : normal));
}

/// Nearest even, to infinity from 65520; a NaN stays a NaN (quiet), with sign and payload's top.
KVTIER_DEVICE std::uint16_t fp16_of_float(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t size = bits & 0x7fffffffu;
  std::uint32_t result;
  if (size > 0x7f800000u) {
    result = 0x7e00u | ((size >> 13) & 0x3ffu);
  } else if (size >= 0x477ff000u) {  // 65520
    result = 0x7c00u;
  } else if (size >= 0x38800000u) {  // 2^-14, the least normal number
    result = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  } else {
    // From 1/2 up a float's last bit is 2^-24, the unit of fp16's subnormals: the sum rounds to it.
    result = bits_of(add(float_of(size), 0.5f)) - bits_of(0.5f);
  }
  return static_cast<std::uint16_t>(sign | result);
}

}  // namespace kvtier::device
