// Completions: what the agent and its backends share.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "bindings.hpp"
#include "kvtier/completions.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvtier::bindings {
namespace {

using Results = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;
using ResultsIn = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr double kWaitSecondsMax = 86400.0 * 365;

Results to_array(std::vector<std::int64_t> values) {
  auto kept = std::make_unique<std::vector<std::int64_t>>(std::move(values));
  const std::size_t count = kept->size();
  std::int64_t* const first = kept->data();
  nb::capsule owner(kept.get(), [](void* kept) noexcept {
    std::unique_ptr<std::vector<std::int64_t>>{static_cast<std::vector<std::int64_t>*>(kept)};
  });
  kept.release();  // NOLINT: the capsule owns it now
  return Results(first, {count}, owner);
}

void push(Completions& completions, std::uint64_t ticket, const ResultsIn& results,
          std::uint64_t started, bool is_quiet, std::string detail) {
  completions.push({ticket,
                    {results.data(), results.data() + results.size()},
                    started,
                    is_quiet,
                    std::move(detail)});
}

nb::tuple drain(Completions& completions) {
  Completions::Drained drained = completions.drain();
  nb::list ended;
  for (Completion& completion : drained.ended) {
    ended.append(nb::make_tuple(completion.ticket, to_array(std::move(completion.results)),
                                completion.started, completion.is_quiet, completion.detail));
  }
  nb::list quiet;
  for (const std::uint64_t ticket : drained.quiet) quiet.append(ticket);
  return nb::make_tuple(ended, quiet);
}

bool wait(Completions& completions, std::uint64_t seen, double timeout_s) {
  const std::chrono::duration<double> timeout(std::clamp(timeout_s, 0.0, kWaitSecondsMax));
  const nb::gil_scoped_release unlocked;
  return completions.wait(seen, std::chrono::duration_cast<std::chrono::nanoseconds>(timeout));
}

}  // namespace

void bind_transfer(nb::module_& m) {
  nb::class_<Completions>(m, "Completions",
                          "Where the ends of transfers queue up until somebody asks. Any thread.")
      .def(nb::init<>())
      .def("push", &push, "ticket"_a, nb::arg("results").noconvert(), "started"_a,
           "is_quiet"_a = true, "detail"_a = "",
           "The end of a transfer: bytes or -errno per piece; pieces from `started` on were never "
           "begun; unless `is_quiet`, its memory may still be touched until `push_quiet`.")
      .def("push_quiet", &Completions::push_quiet, "ticket"_a,
           "Nothing touches the memory of this ended transfer any more.")
      .def("signal", &Completions::signal, "Wake whoever sleeps: there is something else to see.")
      .def("drain", &drain,
           nb::sig("def drain(self) -> tuple[list[tuple[int, NDArray[numpy.int64], int, bool, "
                   "str]], list[int]]"),
           "What was pushed since the last call: ends as (ticket, results, started, is_quiet, "
           "detail), and the tickets that became quiet.")
      .def_prop_ro("generation", &Completions::generation, "Counts pushes and signals.")
      .def("wait", &wait, "seen"_a, "timeout_s"_a,
           "Sleep until `generation` is no longer `seen`; False when the time is over first.")
      .def("fileno", &Completions::fd, "An eventfd, readable from a push until `clear_fd`.")
      .def("clear_fd", &Completions::clear_fd, "Make the eventfd wait for the next push.");
}

}  // namespace kvtier::bindings
