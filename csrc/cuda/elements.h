// What one element of KV is, for the kernels that compute with it: quantise and RoPE.
//
// Copies move bytes and need none of this. One source for nvcc, NVRTC and g++, as types.h.
#pragma once

#include "types.h"

namespace kvtier::device {

/// The element types that kernels compute with; always in fp32, whatever they read and write.
enum class ElementType : std::uint32_t { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

/// Elements that one thread takes at a time: one 16-byte vector of bf16 or fp16, two of fp32.
constexpr std::uint32_t kOctet = 8;

/// The largest finite fp16. Quantised values stay within it, since scale and zero are fp16.
constexpr float kLargestHalf = 65504.0f;

}  // namespace kvtier::device
