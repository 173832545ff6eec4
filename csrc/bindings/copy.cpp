#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.hpp"
#include "kvtier/copy_plan.hpp"
#include "kvtier/host_copy.hpp"
#include "kvtier/thread_pool.hpp"
#include "kvtier/xxh3.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvtier::bindings {
namespace {

template <typename Integer>
using Array = nb::ndarray<const Integer, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using U64Array = Array<std::uint64_t>;
using U32Array = Array<std::uint32_t>;
using I64Array = Array<std::int64_t>;
using FlagArray = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

template <typename Integer>
std::span<const Integer> to_span(const Array<Integer>& array) {
  return {array.data(), array.shape(0)};
}

CopyMode to_mode(std::string_view name) {
  if (const auto mode = find_copy_mode(name)) return *mode;
  std::string known;
  for (const CopyMode mode : copy_modes()) known.append(" ").append(copy_mode_name(mode));
  throw std::invalid_argument("copy mode '" + std::string(name) + "', this machine has" + known);
}

std::vector<std::string> mode_names() {
  std::vector<std::string> names;
  for (const CopyMode mode : copy_modes()) names.emplace_back(copy_mode_name(mode));
  return names;
}

void copy(ThreadPool& pool, const U64Array& targets, const U64Array& sources,
          const U64Array& lengths, std::string_view mode) {
  const CopyMode copy_mode = to_mode(mode);
  const nb::gil_scoped_release release;
  copy_pieces(pool, to_span(targets), to_span(sources), to_span(lengths), copy_mode);
}

std::vector<Xxh3Digest> digest_pieces(ThreadPool& pool, const U64Array& addresses,
                                      const U64Array& lengths) {
  std::vector<Xxh3Digest> digests(addresses.shape(0));
  const nb::gil_scoped_release release;
  xxh3_128_pieces(pool, to_span(addresses), to_span(lengths), digests);
  return digests;
}

nb::bytes checksum(ThreadPool& pool, const U64Array& addresses, const U64Array& lengths) {
  const auto digests = digest_pieces(pool, addresses, lengths);
  return nb::bytes(digests.data(), digests.size() * sizeof(Xxh3Digest));
}

FlagArray verify(ThreadPool& pool, const U64Array& addresses, const U64Array& lengths,
                 const nb::bytes& digests) {
  if (digests.size() != addresses.shape(0) * sizeof(Xxh3Digest)) {
    throw std::invalid_argument(std::to_string(digests.size()) + " bytes of digests for " +
                                std::to_string(addresses.shape(0)) + " pieces, must be " +
                                std::to_string(sizeof(Xxh3Digest)) + " each");
  }
  const auto found = digest_pieces(pool, addresses, lengths);
  const auto* expected = static_cast<const std::uint8_t*>(digests.data());
  auto flags = std::make_unique<std::vector<std::uint8_t>>(found.size());
  for (std::size_t i = 0; i < found.size(); ++i, expected += sizeof(Xxh3Digest)) {
    (*flags)[i] = std::equal(found[i].begin(), found[i].end(), expected) ? 1 : 0;
  }
  std::uint8_t* const values = flags->data();
  const std::size_t count = flags->size();
  const nb::capsule owner(flags.get(), [](void* held) noexcept {
    delete static_cast<std::vector<std::uint8_t>*>(held);
  });
  static_cast<void>(flags.release());
  return FlagArray(values, {count}, owner);
}

CopyPlan make_plan(const U64Array& plane_addresses, std::int64_t page_count,
                   std::int64_t page_stride, std::int64_t rows, std::int64_t row_stride,
                   std::int64_t cols, std::int64_t col_stride, std::int64_t run_bytes) {
  for (const std::int64_t value :
       {page_count, page_stride, rows, row_stride, cols, col_stride, run_bytes}) {
    if (value < 0) {
      throw std::invalid_argument("extent or stride " + std::to_string(value) +
                                  ", must not be negative");
    }
  }
  const auto unsign = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  return CopyPlan(to_span(plane_addresses),
                  {unsign(page_count), unsign(page_stride), unsign(rows), unsign(row_stride),
                   unsign(cols), unsign(col_stride), unsign(run_bytes)});
}

using Direction = std::uint64_t (CopyPlan::*)(ThreadPool&, const CopyRequest&, CopyMode) const;

template <Direction kDirection>
std::uint64_t move(const CopyPlan& plan, ThreadPool& pool, const I64Array& page_ids,
                   const U32Array& page_offsets, const U64Array& segments,
                   std::uint64_t first_plane, std::uint64_t plane_count, std::string_view mode) {
  const CopyMode copy_mode = to_mode(mode);
  const CopyRequest request{to_span(page_ids), to_span(page_offsets), to_span(segments),
                            first_plane, plane_count};
  const nb::gil_scoped_release release;
  return (plan.*kDirection)(pool, request, copy_mode);
}

template <Direction kDirection>
void def_move(nb::class_<CopyPlan>& plan, const char* name, const char* doc) {
  plan.def(name, move<kDirection>, "pool"_a, "page_ids"_a.noconvert(), "page_offsets"_a.noconvert(),
           "segments"_a.noconvert(), "first_plane"_a, "plane_count"_a, "mode"_a = "auto", doc);
}

}  // namespace

void bind_copy(nb::module_& m) {
  nb::class_<ThreadPool>(m, "CopyPool",
                         "Threads for memory copies and checksums; the calling thread is one of "
                         "them. Calls from several threads queue up.")
      .def(nb::init<std::size_t>(), "thread_count"_a)
      .def_prop_ro("thread_count", &ThreadPool::thread_count, "Threads, the caller included.")
      .def_static("modes", mode_names, "The copy modes that this machine runs; the first is auto.")
      .def("copy", copy, "targets"_a.noconvert(), "sources"_a.noconvert(), "lengths"_a.noconvert(),
           "mode"_a = "auto", "Copy bytes between addresses, piece by piece, in parallel.")
      .def("checksum", checksum, "addresses"_a.noconvert(), "lengths"_a.noconvert(),
           "XXH3-128 of each piece, 16 bytes each, concatenated.")
      .def("verify", verify, "addresses"_a.noconvert(), "lengths"_a.noconvert(), "digests"_a,
           "1 for each piece whose checksum is the one given, else 0.");

  nb::class_<CopyPlan> plan(m, "CopyPlan",
                            "Where each byte of an engine's paged KV lies, and the copies between "
                            "it and block-first segments. Usable from any thread.");
  plan.def(
          "__init__",
          [](CopyPlan* place, const U64Array& plane_addresses, std::int64_t page_count,
             std::int64_t page_stride, std::int64_t rows, std::int64_t row_stride,
             std::int64_t cols, std::int64_t col_stride, std::int64_t run_bytes) {
            new (place) CopyPlan(make_plan(plane_addresses, page_count, page_stride, rows,
                                           row_stride, cols, col_stride, run_bytes));
          },
          "plane_addresses"_a.noconvert(), "page_count"_a, "page_stride"_a, "rows"_a,
          "row_stride"_a, "cols"_a, "col_stride"_a, "run_bytes"_a)
      .def_prop_ro("plane_count", &CopyPlan::plane_count, "Planes: one per (layer, K or V).")
      .def_prop_ro("page_count", &CopyPlan::page_count, "Pages in each plane.")
      .def_prop_ro("plane_bytes", &CopyPlan::plane_bytes, "Bytes of one page in one plane.");
  def_move<&CopyPlan::gather>(plan, "gather",
                              "Copy engine pages into segments; returns the bytes moved.");
  def_move<&CopyPlan::scatter>(plan, "scatter",
                               "Copy segments into engine pages; returns the bytes moved.");
}

}  // namespace kvtier::bindings
