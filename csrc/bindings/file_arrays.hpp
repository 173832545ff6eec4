// Arrays of descriptors, offsets, addresses and lengths in, results per item out: what the engines
// that move between files and memory share.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvtier/file_engine.hpp"
#include "kvtier/stop_flag.hpp"

namespace kvtier::bindings {
namespace nb = nanobind;

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Results = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

inline Results to_array(std::vector<std::int64_t> values) {
  auto kept = std::make_unique<std::vector<std::int64_t>>(std::move(values));
  const std::size_t count = kept->size();
  std::int64_t* const first = kept->data();
  nb::capsule owner(kept.get(), [](void* kept) noexcept {
    std::unique_ptr<std::vector<std::int64_t>>{static_cast<std::vector<std::int64_t>*>(kept)};
  });
  kept.release();  // NOLINT: the capsule owns it now
  return Results(first, {count}, owner);
}

/// `transfer` is a member function of `Engine` like `FileEngine::read`.
template <typename Engine, auto transfer>
Results run(Engine& engine, Array<std::int32_t> fds, Array<std::uint64_t> offsets,
            Array<std::uint64_t> addresses, Array<std::uint64_t> lengths, StopFlag* stop) {
  const std::size_t count = fds.size();
  if (offsets.size() != count || addresses.size() != count || lengths.size() != count) {
    throw std::invalid_argument(std::to_string(count) + " descriptors, " +
                                std::to_string(offsets.size()) + " offsets, " +
                                std::to_string(addresses.size()) + " addresses, " +
                                std::to_string(lengths.size()) + " lengths: as many of each");
  }
  std::vector<FileTransfer> items;
  items.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    items.push_back({fds.data()[i], offsets.data()[i],
                     reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(addresses.data()[i])),
                     lengths.data()[i]});
  }
  std::vector<std::int64_t> results(count);
  {
    const nb::gil_scoped_release unlocked;
    (engine.*transfer)(items, results, stop);
  }
  return to_array(std::move(results));
}

}  // namespace kvtier::bindings
