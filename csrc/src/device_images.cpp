#include "kvtier/device_images.hpp"

#include "embedded_images.hpp"

namespace kvtier {
namespace {

/// Cubins of a system on chip and of other devices do not run on each other.
bool is_system_on_chip(int architecture) { return architecture == 87 || architecture == 101; }

}  // namespace

std::span<const std::byte> find_cubin(int major, int minor) {
  const int device = 10 * major + minor;
  std::span<const std::byte> found;
  for (const EmbeddedCubin& cubin : embedded_cubins()) {
    const bool is_own = cubin.architecture == device;
    const bool is_older = cubin.architecture / 10 == major && cubin.architecture % 10 < minor &&
                          !is_system_on_chip(device) && !is_system_on_chip(cubin.architecture);
    if (is_own || is_older) found = cubin.image;
  }
  return found;
}

std::vector<int> cubin_architectures() {
  std::vector<int> architectures;
  for (const EmbeddedCubin& cubin : embedded_cubins()) architectures.push_back(cubin.architecture);
  return architectures;
}

}  // namespace kvtier
