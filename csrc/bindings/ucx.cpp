// UcxEngine: arrays of pieces in; ends of transfers go to the Completions.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "kvtier/ucx_engine.hpp"

namespace kvtier::bindings {
namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Settings = std::vector<std::pair<std::string, std::string>>;

/// What Python holds of a class of which the header says no more than its name.
template <typename T>
struct Held {
  std::shared_ptr<T> it;
};
using Memory = Held<UcxMemory>;
using Remote = Held<UcxRemote>;
using Link = Held<UcxLink>;
using Prepared = Held<UcxPrepared>;

template <typename T>
std::vector<std::shared_ptr<T>> take_out(const std::vector<Held<T>>& held) {
  std::vector<std::shared_ptr<T>> out;
  out.reserve(held.size());
  for (const Held<T>& each : held) out.push_back(each.it);
  return out;
}

std::string to_string(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
nb::bytes to_bytes(const std::string& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

void make(UcxEngine* self, std::shared_ptr<Completions> completions, std::string wheel_path,
          Settings settings, bool may_copy_on_host, std::uint32_t copy_threads,
          std::uint64_t window_bytes, std::uint32_t window_requests,
          std::uint64_t request_bytes_max, std::uint64_t message_bytes_max, double drain_s) {
  const nb::gil_scoped_release unlocked;
  new (self)
      UcxEngine({std::move(wheel_path), std::move(settings), may_copy_on_host, copy_threads,
                 window_bytes, window_requests, request_bytes_max, message_bytes_max, drain_s},
                std::move(completions));
}

Memory map(UcxEngine& engine, std::uint64_t address, std::uint64_t length, bool is_writable) {
  return {engine.map(address, length, is_writable)};
}

Link connect(UcxEngine& engine, const nb::bytes& address, std::int64_t host_pid) {
  const std::string copy = to_string(address);
  const nb::gil_scoped_release unlocked;
  return {engine.connect(copy, host_pid)};
}

Remote import_remote(UcxEngine& engine, const Link& link, const nb::bytes& packed) {
  const std::string copy = to_string(packed);
  const nb::gil_scoped_release unlocked;
  return {engine.import_remote(link.it, copy)};
}

Prepared prepare(UcxEngine&, bool is_read, const Link& link, const std::vector<Memory>& memories,
                 const Array<std::uint32_t>& local_which,
                 const Array<std::uint64_t>& local_addresses, const std::vector<Remote>& remotes,
                 const Array<std::uint32_t>& remote_which,
                 const Array<std::uint64_t>& remote_addresses,
                 const Array<std::uint64_t>& lengths) {
  const std::size_t count = lengths.size();
  if (local_which.size() != count || local_addresses.size() != count ||
      remote_which.size() != count || remote_addresses.size() != count) {
    throw std::invalid_argument(std::to_string(count) + " lengths: as many of each array");
  }
  const nb::gil_scoped_release unlocked;
  std::vector<UcxPiece> pieces(count);
  for (std::size_t i = 0; i < count; ++i) {
    pieces[i] = {local_addresses.data()[i], remote_addresses.data()[i], lengths.data()[i],
                 local_which.data()[i], remote_which.data()[i]};
  }
  return {UcxEngine::prepare(is_read ? UcxOp::kRead : UcxOp::kWrite, link.it, take_out(memories),
                             take_out(remotes), std::move(pieces))};
}

}  // namespace

void bind_ucx(nb::module_& m) {
  nb::class_<Memory>(m, "UcxMemory", "Memory of this process that UCX has registered.");
  nb::class_<Remote>(m, "UcxRemote", "A peer's memory, as seen through one link.");
  nb::class_<Link>(m, "UcxLink", "The way to one peer.");
  nb::class_<Prepared>(m, "UcxPrepared", "What a transfer moves, checked and copied once.");
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<UcxEngine>(m, "UcxEngine",
                        "One-sided transfers to peers through UCX, on one thread that sleeps when "
                        "nothing moves. Any thread; RuntimeError where UCX does not serve.")
      .def("__init__", &make, "completions"_a, "wheel_path"_a = "", "settings"_a = Settings{},
           "may_copy_on_host"_a = true, "copy_threads"_a = UcxOptions{}.copy_threads,
           "window_bytes"_a = UcxOptions{}.window_bytes,
           "window_requests"_a = UcxOptions{}.window_requests,
           "request_bytes_max"_a = UcxOptions{}.request_bytes_max,
           "message_bytes_max"_a = UcxOptions{}.message_bytes_max,
           "drain_s"_a = UcxOptions{}.drain_s,
           "`settings` are UCX's, without UCX_; the environment's win. UCX is looked for on the "
           "system first, then at `wheel_path`.")
      .def_prop_ro("version", &UcxEngine::version, "Of the UCX library.")
      .def_prop_ro("library_path", &UcxEngine::library_path, "Where that was found.")
      .def_prop_ro("transports", &UcxEngine::transports, "What it can use here: transport/device.")
      .def_prop_ro("has_rdma", &UcxEngine::has_rdma, "Whether one of them is RDMA.")
      .def(
          "address", [](const UcxEngine& engine) { return to_bytes(engine.address()); },
          "How engines elsewhere reach this one.")
      .def("map", &map, "address"_a, "length"_a, "is_writable"_a = true, Unlocked(),
           "Register memory.")
      .def(
          "unmap", [](UcxEngine& engine, const Memory& memory) { engine.unmap(memory.it); },
          "memory"_a, Unlocked(), "Release it; no transfer may use it any more.")
      .def(
          "pack",
          [](UcxEngine&, const Memory& memory) { return to_bytes(UcxEngine::pack(*memory.it)); },
          "memory"_a, "What a peer needs to reach the memory.")
      .def("connect", &connect, "address"_a, "host_pid"_a = -1,
           "A link to the engine that gave `address`; on this host if `host_pid` is its process.")
      .def("import_remote", &import_remote, "link"_a, "packed"_a,
           "A peer's memory from what its `pack` gave.")
      .def(
          "forget_remote",
          [](UcxEngine& engine, const Remote& remote) { engine.forget_remote(remote.it); },
          "remote"_a, "Release it; no transfer may use it any more.")
      .def(
          "disconnect", [](UcxEngine& engine, const Link& link) { engine.disconnect(link.it); },
          "link"_a, "End what is in flight on it with -ECONNRESET, and all that is started later.")
      .def("prepare", &prepare, "is_read"_a, "link"_a, "memories"_a,
           nb::arg("local_which").noconvert(), nb::arg("local_addresses").noconvert(), "remotes"_a,
           nb::arg("remote_which").noconvert(), nb::arg("remote_addresses").noconvert(),
           nb::arg("lengths").noconvert(), "Check and copy what a transfer moves.")
      .def(
          "start",
          [](UcxEngine& engine, const Prepared& prepared, std::uint64_t ticket, double deadline_s) {
            engine.start(prepared.it, ticket, deadline_s);
          },
          "prepared"_a, "ticket"_a, "deadline_s"_a, Unlocked(),
          "Begin; its end goes to the completions within `deadline_s`.")
      .def("cancel", &UcxEngine::cancel, "ticket"_a, Unlocked(),
           "End it soon with -ECANCELED; unknown ones are over.")
      .def("progress", &UcxEngine::progress, "ticket"_a, "Bytes that have arrived so far.")
      .def("close", &UcxEngine::close, Unlocked(),
           "End all that is in flight and release all but mapped memory; again, do nothing.");
}

}  // namespace kvtier::bindings
