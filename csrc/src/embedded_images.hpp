// What the build puts into the core of the device kernels (cuda/images.cmake defines it).
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace kvtier {

struct EmbeddedCubin {
  int architecture;  // 90: sm_90
  std::span<const std::byte> image;
};

struct EmbeddedSource {
  std::string_view name;            // as the other sources include it
  std::span<const std::byte> text;  // a zero byte follows it
};

/// In ascending order of their architectures; none where the build had no compiler for them.
std::span<const EmbeddedCubin> embedded_cubins();

/// kernels.cu and all that it includes.
std::span<const EmbeddedSource> embedded_sources();

/// What NVRTC is given besides the architecture.
std::span<const char* const> nvrtc_options();

}  // namespace kvtier
