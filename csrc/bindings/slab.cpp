// Slab: the memory that records live in, and memoryviews that keep it alive.
#include "kvtier/slab.hpp"

#include <nanobind/ndarray.h>

#include <memory>

#include "bindings.hpp"

namespace kvtier::bindings {
namespace nb = nanobind;

namespace {

using Held = std::shared_ptr<const Mapping>;
using View = nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>>;

View memory(const Slab& slab, std::uint64_t offset, std::uint64_t nbytes) {
  auto held = std::make_unique<Held>(slab.hold(offset, nbytes));
  std::byte* const address = (*held)->address() + offset;
  nb::capsule owner(held.get(),
                    [](void* held) noexcept { std::unique_ptr<Held>{static_cast<Held*>(held)}; });
  held.release();  // NOLINT: the capsule owns it now
  return View(reinterpret_cast<std::uint8_t*>(address), {nbytes}, owner);
}

}  // namespace

void bind_slab(nb::module_& m) {
  nb::class_<Slab>(
      m, "Slab",
      "One anonymous mapping on huge pages, allocated in multiples of 4 KiB. Any thread.")
      .def(nb::init<std::uint64_t, bool>(), nb::arg("capacity_bytes"), nb::arg("prefault") = true,
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("address", &Slab::address, "Address of the first byte; 0 once closed.")
      .def_prop_ro("capacity_bytes", &Slab::capacity_bytes, "Bytes that can be allocated.")
      .def_prop_ro("used_bytes", &Slab::used_bytes, "Bytes allocated now.")
      .def_prop_ro("prefaulted_bytes", &Slab::prefaulted_bytes,
                   "Bytes from the low end that the background thread has made real.")
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
           "Writable bytes, without a copy; they keep the memory mapped.")
      .def("close", &Slab::close, nb::call_guard<nb::gil_scoped_release>(),
           "Stop prefaulting and unmap once no memoryview is left. Calling it again does nothing.");
}

}  // namespace kvtier::bindings
