// FileEngine: arrays of descriptors, offsets, addresses and lengths in, results per item out.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "bindings.hpp"
#include "file_arrays.hpp"
#include "kvtier/file_engine.hpp"
#include "kvtier/stop_flag.hpp"

namespace kvtier::bindings {
namespace nb = nanobind;

namespace {

Results allocate(FileEngine& engine, Array<std::int32_t> fds, Array<std::uint64_t> lengths) {
  std::vector<std::int64_t> results(fds.size());
  {
    const nb::gil_scoped_release unlocked;
    engine.allocate({fds.data(), fds.size()}, {lengths.data(), lengths.size()}, results);
  }
  return to_array(std::move(results));
}

Results sync(FileEngine& engine, Array<std::int32_t> fds, bool data_only) {
  const std::vector<int> files(fds.data(), fds.data() + fds.size());
  std::vector<std::int64_t> results(files.size());
  {
    const nb::gil_scoped_release unlocked;
    engine.sync(files, data_only, results);
  }
  return to_array(std::move(results));
}

void translate_system_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
}

}  // namespace

void bind_file_io(nb::module_& m) {
  nb::register_exception_translator(translate_system_error);
  nb::class_<StopFlag>(m, "StopFlag",
                       "How a batch that runs is told that nobody waits for it. Any thread.")
      .def(nb::init<>())
      .def("set", &StopFlag::set, "Begin nothing more; it cannot be taken back.")
      .def_prop_ro("is_set", &StopFlag::is_set, "Whether it was.")
      .def_prop_ro("moved_bytes", &StopFlag::moved_bytes,
                   "Bytes of the batch's segments that are over, so far.");
  nb::class_<FileEngine>(m, "FileEngine",
                         "Batches of positional reads and writes on open files, cut into segments, "
                         "`depth` of them in flight. Any thread, several at once.")
      .def(
          "__init__",
          [](FileEngine* self, std::uint32_t depth, std::uint64_t segment_bytes,
             const std::string& method) {
            new (self) FileEngine(depth, segment_bytes, parse_file_method(method));
          },
          nb::arg("depth") = 16, nb::arg("segment_bytes") = 1 << 20, nb::arg("method") = "auto")
      .def_prop_ro(
          "method",
          [](const FileEngine& engine) { return std::string(file_method_name(engine.method())); },
          "The method in use: uring or threads.")
      .def("read", &run<FileEngine, &FileEngine::read>, nb::arg("fds").noconvert(),
           nb::arg("offsets").noconvert(), nb::arg("addresses").noconvert(),
           nb::arg("lengths").noconvert(), nb::arg("stop") = nb::none(),
           "Bytes read per item, fewer where the file ends, or -errno; once `stop` is set nothing "
           "more is begun, and what is not whole then is -ECANCELED.")
      .def("write", &run<FileEngine, &FileEngine::write>, nb::arg("fds").noconvert(),
           nb::arg("offsets").noconvert(), nb::arg("addresses").noconvert(),
           nb::arg("lengths").noconvert(), nb::arg("stop") = nb::none(),
           "Bytes written per item, all of them, or -errno; `stop` as in `read`.")
      .def("allocate", &allocate, nb::arg("fds").noconvert(), nb::arg("lengths").noconvert(),
           "Give each file its size and room on the disk ahead of the writes: 0 or -errno.")
      .def("sync", &sync, nb::arg("fds").noconvert(), nb::arg("data_only") = true,
           "Bring each to stable storage: 0 or -errno. A folder's new names need data_only=False.")
      .def("close", &FileEngine::close, nb::call_guard<nb::gil_scoped_release>(),
           "Wait for the calls in progress and release everything. Calling it again does nothing.");
}

}  // namespace kvtier::bindings
