// A caller's bytes, held for as long as C++ reads them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier::bindings {

/// Read access to any C-contiguous buffer (bytes, bytearray, memoryview, mmap, array).
/// Made and dropped under the GIL; the bytes may be read without it.
class ReadBuffer {
 public:
  explicit ReadBuffer(nanobind::handle source) {
    if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nanobind::python_error();
  }
  ~ReadBuffer() { PyBuffer_Release(&view_); }
  ReadBuffer(const ReadBuffer&) = delete;
  ReadBuffer& operator=(const ReadBuffer&) = delete;

  std::span<const std::uint8_t> bytes() const {
    return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

}  // namespace kvtier::bindings
