// The kernels' images, for tests and for who wants to look into them.
#include "kvtier/device_images.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

void bind_device_images(nb::module_& m) {
  nb::class_<JitResult>(m, "JitResult", "What NVRTC made of the device kernels.")
      .def_prop_ro(
          "image",
          [](const JitResult& result) {
            return nb::bytes(result.image.data(), result.image.size());
          },
          "A cubin, or PTX with its zero byte; empty on failure.")
      .def_ro("target", &JitResult::target, "Such as sm_90, or compute_121 for PTX.")
      .def_ro("compiler", &JitResult::compiler, "Such as NVRTC 12.9.")
      .def_ro("failure", &JitResult::failure, "Why there is no image; else empty.")
      .def_ro("is_cached", &JitResult::is_cached, "It came from the cache on disk.")
      .def_ro("no_cache", &JitResult::no_cache, "Why it could not be kept there; else empty.");
  m.def("cubin_architectures", &cubin_architectures,
        "Such as [80, 90]: what cubins of the device kernels are built in for.");
  m.def(
      "find_cubin",
      [](int major, int minor) {
        const auto image = find_cubin(major, minor);
        return nb::bytes(image.data(), image.size());
      },
      nb::arg("major"), nb::arg("minor"),
      "The built-in cubin that a device of this compute capability runs, or nothing.");
  m.def("compile_kernels", &compile_kernels, nb::arg("major"), nb::arg("minor"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Compile the device kernels for a compute capability by NVRTC, or take them from the "
        "cache. Any thread; never raises.");
}

}  // namespace kvtier::bindings
