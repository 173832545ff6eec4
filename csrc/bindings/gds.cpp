// GdsEngine: FileEngine's arrays, with memory of a GPU among the addresses.
#include <nanobind/nanobind.h>
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

std::pair<int, std::string> meaning(int code) {
  return {GdsEngine::error_number_of(code), GdsEngine::words_of(code)};
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
                        "cuFile, cut into segments, on `threads` threads. Any thread, several at "
                        "once. OSError, with the reason, where cuFile cannot be used.")
      .def(nb::init<std::uint32_t, std::uint64_t, const std::string&>(), nb::arg("threads") = 16,
           nb::arg("segment_bytes") = 4 << 20, nb::arg("wheel_path") = "", unlocked)
      .def_prop_ro("library_path", &GdsEngine::library_path, "The cuFile library in use.")
      .def("add_file", &GdsEngine::add_file, nb::arg("fd"), unlocked,
           "Make an open file known; it stays open until `remove_file`.")
      .def("remove_file", &GdsEngine::remove_file, nb::arg("fd"), unlocked, "Forget a file.")
      .def("add_memory", &GdsEngine::add_memory, nb::arg("address"), nb::arg("nbytes"), unlocked,
           "Make memory known; False where it overlaps other memory, and then it works without.")
      .def("remove_memory", &GdsEngine::remove_memory, nb::arg("address"), unlocked,
           "Undo one `add_memory` that was True.")
      .def("read", &run<GdsEngine, &GdsEngine::read>, nb::arg("fds").noconvert(),
           nb::arg("offsets").noconvert(), nb::arg("addresses").noconvert(),
           nb::arg("lengths").noconvert(), nb::arg("stop") = nb::none(),
           "As `FileEngine.read`; a failure may be a code of cuFile's own, see `meaning`.")
      .def("write", &run<GdsEngine, &GdsEngine::write>, nb::arg("fds").noconvert(),
           nb::arg("offsets").noconvert(), nb::arg("addresses").noconvert(),
           nb::arg("lengths").noconvert(), nb::arg("stop") = nb::none(),
           "As `FileEngine.write`, with codes as `read`.")
      .def_static("meaning", &meaning, nb::arg("code"),
                  "The errno nearest to a failure's code, and what the code means in words.")
      .def("close", &GdsEngine::close, unlocked,
           "Wait for the calls in progress, forget all files and memory, close cuFile's driver. "
           "Calling it again does nothing.");
}

}  // namespace kvtier::bindings
