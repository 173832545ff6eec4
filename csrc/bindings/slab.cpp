// Slab: the memory that records live in, and memoryviews that keep it alive.
#include "kvtier/slab.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>

#include "bindings.hpp"

namespace kvtier::bindings {
namespace nb = nanobind;

namespace {

using Held = std::shared_ptr<const Mapping>;

template <typename Byte>
nb::object view(Byte* first, std::uint64_t nbytes, const nb::capsule& owner) {
  return nb::cast(nb::ndarray<nb::memview, Byte, nb::ndim<1>>(first, {nbytes}, owner));
}

nb::object memory(const Slab& slab, std::uint64_t offset, std::uint64_t nbytes) {
  auto held = std::make_unique<Held>(slab.hold(offset, nbytes));
  const bool is_writable = (*held)->is_writable();
  auto* const first = reinterpret_cast<std::uint8_t*>((*held)->address() + offset);
  nb::capsule owner(held.get(),
                    [](void* held) noexcept { std::unique_ptr<Held>{static_cast<Held*>(held)}; });
  held.release();  // NOLINT: the capsule owns it now
  return is_writable ? view<std::uint8_t>(first, nbytes, owner)
                     : view<const std::uint8_t>(first, nbytes, owner);
}

}  // namespace

void bind_slab(nb::module_& m) {
  nb::class_<Slab>(
      m, "Slab",
      "One mapping, on huge pages if there are any, allocated in multiples of 4 KiB. Any thread.")
      .def(nb::init<std::uint64_t, bool>(), nb::arg("capacity_bytes"), nb::arg("prefault") = true,
           nb::call_guard<nb::gil_scoped_release>())
      .def_static(
          "over",
          [](int fd, std::uint64_t size_bytes, bool is_writable, bool prefault) {
            return std::make_unique<Slab>(
                std::make_shared<const Mapping>(fd, size_bytes, is_writable), prefault);
          },
          nb::arg("fd"), nb::arg("size_bytes"), nb::arg("is_writable"), nb::arg("prefault") = true,
          nb::call_guard<nb::gil_scoped_release>(),
          "Shared with whoever maps the same file, which has `size_bytes` and never becomes "
          "shorter; `fd` may be closed afterwards.")
      .def_prop_ro("address", &Slab::address, "Address of the first byte; 0 once closed.")
      .def_prop_ro("capacity_bytes", &Slab::capacity_bytes, "Bytes that can be allocated.")
      .def_prop_ro("used_bytes", &Slab::used_bytes, "Bytes allocated now.")
      .def_prop_ro("prefaulted_bytes", &Slab::prefaulted_bytes,
                   "Bytes from the low end that the background thread has made real.")
      .def_prop_ro("joined_bytes", &Slab::joined_bytes,
                   "Bytes of shared memory for which that thread has asked for huge pages; it does "
                   "so after the rest, and stops where the kernel cannot.")
      .def_prop_ro("largest_free_bytes", &Slab::largest_free_bytes,
                   "The longest run that `allocate` could give.")
      .def(
          "allocate",
          [](Slab& slab, std::uint64_t nbytes) {
            const auto offset = slab.allocate(nbytes);
            return offset ? static_cast<std::int64_t>(*offset) : std::int64_t{-1};
          },
          nb::arg("nbytes"),
          "Offset of a run of `nbytes`, rounded up to 4 KiB; -1 when there is none.")
      .def("free", &Slab::free, nb::arg("offset"),
           "Give back the run at `offset`; ValueError when none is allocated there.")
      .def("memory", &memory, nb::arg("offset"), nb::arg("nbytes"),
           nb::sig("def memory(self, offset: int, nbytes: int) -> memoryview"),
           "The bytes themselves, writable if the mapping is; they keep the memory mapped.")
      .def("close", &Slab::close, nb::call_guard<nb::gil_scoped_release>(),
           "Stop prefaulting and unmap once no memoryview is left. Calling it again does nothing.");
}

}  // namespace kvtier::bindings
