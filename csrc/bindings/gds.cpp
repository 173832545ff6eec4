// GdsEngine: FileEngine's arrays, with memory of a GPU among the addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "bindings.hpp"
#include "file_arrays.hpp"
#include "kvtier/gds_engine.hpp"

namespace kvtier::bindings {
namespace {

std::pair<int, std::string> meaning(GdsEngine& engine, int code) {
  return {GdsEngine::error_number_of(code), engine.words_of(code)};
}

void translate_gds_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const GdsError& error) {
    const nb::object arguments = nb::make_tuple(error.error_number(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

}  // namespace

void bind_gds(nb::module_& m) {
  nb::register_exception_translator(translate_gds_error);
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<GdsEngine>(m, "GdsEngine",
                        "Batches of reads and writes between files and GPU or host memory by "
                        "cuFile, cut into segments, `depth` of them in flight. Any thread, several "
                        "at once. OSError, with the reason, where cuFile cannot be used.")
      .def(
          "__init__",
          [](GdsEngine* self, std::uint32_t depth, std::uint64_t segment_bytes,
             const std::string& wheel_path, const std::string& mode) {
            const GdsMode parsed = parse_gds_mode(mode);
            const nb::gil_scoped_release released;
            new (self) GdsEngine(depth, segment_bytes, wheel_path, parsed);
          },
          nb::arg("depth") = 16, nb::arg("segment_bytes") = 4 << 20, nb::arg("wheel_path") = "",
          nb::arg("mode") = "threads")
      .def_prop_ro("library_path", &GdsEngine::library_path, "The cuFile library in use.")
      .def_prop_ro("no_cuda", &GdsEngine::no_cuda,
                   "Why GPU memory cannot be served; empty if it can.")
      .def("add_file", &GdsEngine::add_file, nb::arg("fd"), unlocked,
           "Make an open file known; it stays open until `remove_file`.")
      .def("remove_file", &GdsEngine::remove_file, nb::arg("fd"), unlocked, "Forget a file.")
      .def("add_memory", &GdsEngine::add_memory, nb::arg("address"), nb::arg("nbytes"),
           nb::arg("device") = nb::none(), unlocked,
           "Make memory known, of a GPU if `device` says of which; gives its number.")
      .def("remove_memory", &GdsEngine::remove_memory, nb::arg("address"), nb::arg("number"),
           unlocked, "Forget memory.")
      .def("read", &run<GdsEngine, &GdsEngine::read>, nb::arg("fds").noconvert(),
           nb::arg("offsets").noconvert(), nb::arg("addresses").noconvert(),
           nb::arg("lengths").noconvert(), nb::arg("stop") = nb::none(),
           "As `FileEngine.read`; a failure may be a code of cuFile's or CUDA's, see `meaning`.")
      .def("write", &run<GdsEngine, &GdsEngine::write>, nb::arg("fds").noconvert(),
           nb::arg("offsets").noconvert(), nb::arg("addresses").noconvert(),
           nb::arg("lengths").noconvert(), nb::arg("stop") = nb::none(),
           "As `FileEngine.write`, with codes as `read`.")
      .def("meaning", &meaning, nb::arg("code"),
           "The errno nearest to a failure's code, and what the code means in words.")
      .def("close", &GdsEngine::close, unlocked,
           "Wait for the calls in progress, forget all files and memory, close cuFile's driver. "
           "Calling it again does nothing.");
}

}  // namespace kvtier::bindings
