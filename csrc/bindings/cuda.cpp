// CudaDevice, DevicePlan, DeviceJob: a CUDA device's memory and copies.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "bindings.hpp"
#include "kvtier/device.hpp"
#include "kvtier/device_plan.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvtier::bindings {
namespace {

template <typename Integer, int kDimensions = 1>
using Array = nb::ndarray<const Integer, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;
using U64Array = Array<std::uint64_t>;
using U64Table = Array<std::uint64_t, 2>;

template <typename Integer>
std::span<const Integer> to_span(const Array<Integer>& array) {
  return {array.data(), array.shape(0)};
}

std::span<const std::uint64_t> to_span(const U64Table& table) {
  return {table.data(), table.shape(0) * table.shape(1)};
}

/// Python says "all" with -1.
std::optional<std::size_t> to_wave(std::int64_t wave) {
  if (wave < -1) throw std::invalid_argument("wave " + std::to_string(wave));
  return wave < 0 ? std::nullopt : std::optional<std::size_t>(static_cast<std::size_t>(wave));
}

std::uint64_t to_size(std::int64_t value, const char* name) {
  if (value < 0) throw std::invalid_argument(std::string(name) + " is negative");
  return static_cast<std::uint64_t>(value);
}

CopyPath to_path(const std::string& path) {
  if (path == "dma") return CopyPath::kDma;
  if (path == "staged") return CopyPath::kStaged;
  if (path == "direct") return CopyPath::kDirect;
  throw std::invalid_argument("path '" + path + "', expected dma, staged or direct");
}

template <DeviceJob (DevicePlan::*kCopy)(const DeviceCopyRequest&, StreamHandle, const CopyWay&)
              const>
DeviceJob move(const DevicePlan& plan, const Array<std::int64_t>& page_ids,
               const Array<std::uint32_t>& page_offsets, const U64Table& segments,
               const U64Table& waves, StreamHandle stream, const std::string& path, bool is_bulk,
               unsigned ctas) {
  if (waves.shape(1) != 2 || segments.shape(0) != waves.shape(0)) {
    throw std::invalid_argument("segments are [wave, chunk], waves [wave, 2]");
  }
  const CopyWay way{to_path(path), is_bulk, ctas};
  const nb::gil_scoped_release released;
  return (plan.*kCopy)(
      {to_span(page_ids), to_span(page_offsets), to_span(segments), to_span(waves)}, stream, way);
}

void translate_device_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const DeviceError& error) {
    const nb::object arguments = nb::make_tuple(error.error_number(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

void bind_job(nb::module_& m) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<DeviceJob>(m, "DeviceJob",
                        "Copies under way on a device, wave by wave. Any thread. OSError when the "
                        "device has failed.")
      .def_prop_ro("nbytes", &DeviceJob::nbytes, "Bytes moved when it is done.")
      .def_prop_ro("wave_count", &DeviceJob::wave_count, "Waves.")
      .def(
          "order_after",
          [](const DeviceJob& job, StreamHandle stream, std::int64_t wave) {
            job.order_after(stream, to_wave(wave));
          },
          "stream"_a, "wave"_a = -1, unlocked,
          "Let what is put on the stream from now on wait for a wave, or for all; not the host.")
      .def(
          "is_done",
          [](const DeviceJob& job, std::int64_t wave) { return job.is_done(to_wave(wave)); },
          "wave"_a = -1, unlocked, "Whether the bytes of a wave, or of all, are in place.")
      .def(
          "wait",
          [](const DeviceJob& job, double timeout_s) {
            const auto limit = std::chrono::duration<double>(std::min(timeout_s, 1e6));
            return job.wait(std::chrono::duration_cast<std::chrono::nanoseconds>(limit));
          },
          "timeout_s"_a, unlocked,
          "Sleep until all is in place; False when the time is over first.")
      .def("elapsed_s", &DeviceJob::elapsed_s, unlocked,
           "Device time from start to end, once it is done.");
}

void bind_plan(nb::module_& m) {
  nb::class_<DevicePlan>(m, "DevicePlan",
                         "Where each byte of an engine's paged KV lies on a device, and the copies "
                         "between it and block-first segments. Usable from any thread.")
      .def(
          "__init__",
          [](DevicePlan* place, const CudaDevice& device, const U64Array& plane_addresses,
             std::int64_t page_count, std::int64_t page_stride, std::int64_t rows,
             std::int64_t row_stride, std::int64_t cols, std::int64_t col_stride,
             std::int64_t run_bytes) {
            const PageShape shape{to_size(page_count, "page_count"),
                                  to_size(page_stride, "page_stride"),
                                  to_size(rows, "rows"),
                                  to_size(row_stride, "row_stride"),
                                  to_size(cols, "cols"),
                                  to_size(col_stride, "col_stride"),
                                  to_size(run_bytes, "run_bytes")};
            const nb::gil_scoped_release released;
            new (place) DevicePlan(device, to_span(plane_addresses), shape);
          },
          "device"_a, "plane_addresses"_a.noconvert(), "page_count"_a, "page_stride"_a, "rows"_a,
          "row_stride"_a, "cols"_a, "col_stride"_a, "run_bytes"_a)
      .def_prop_ro(
          "plane_count", [](const DevicePlan& plan) { return plan.geometry().plane_count(); },
          "Planes: one per (layer, K or V).")
      .def_prop_ro(
          "page_count", [](const DevicePlan& plan) { return plan.geometry().page_count(); },
          "Pages in each plane.")
      .def_prop_ro(
          "plane_bytes", [](const DevicePlan& plan) { return plan.geometry().plane_bytes(); },
          "Bytes of one page in one plane.")
      .def_prop_ro(
          "run_bytes", [](const DevicePlan& plan) { return plan.geometry().run_bytes(); },
          "Bytes of one plane that are copied as one piece.")
      .def_prop_ro(
          "joined_planes", [](const DevicePlan& plan) { return plan.geometry().joined_planes(); },
          "Planes, from the first on, that lie one behind the other on both sides.")
      .def_prop_ro("vector_bytes", &DevicePlan::vector_bytes,
                   "The widest vector of kernels on the engine's side.")
      .def("gather", &move<&DevicePlan::gather>, "page_ids"_a.noconvert(),
           "page_offsets"_a.noconvert(), "segments"_a.noconvert(), "waves"_a.noconvert(),
           "stream"_a, "path"_a = "dma", "is_bulk"_a = false, "ctas"_a = 0,
           "Begin to copy pages into segments, after what is on `stream` now.")
      .def("scatter", &move<&DevicePlan::scatter>, "page_ids"_a.noconvert(),
           "page_offsets"_a.noconvert(), "segments"_a.noconvert(), "waves"_a.noconvert(),
           "stream"_a, "path"_a = "dma", "is_bulk"_a = false, "ctas"_a = 0,
           "Begin to copy segments into pages, after what is on `stream` now.");
}

}  // namespace

void bind_cuda(nb::module_& m) {
  nb::register_exception_translator(translate_device_error);
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  bind_job(m);
  nb::class_<CudaDevice>(
      m, "CudaDevice",
      "One CUDA device: its memory, page-locked host memory, and copies on "
      "streams of its own. Any thread. OSError, with the reason, where it cannot "
      "be used.")
      .def(
          "__init__",
          [](CudaDevice* place, int ordinal, const std::string& mode, std::int64_t staging_bytes,
             unsigned sm_budget, std::int64_t launch_items_max) {
            if (mode != "auto" && mode != "jit") {
              throw std::invalid_argument("mode '" + mode + "', expected auto or jit");
            }
            const DeviceOptions options{mode == "jit" ? KernelMode::kJit : KernelMode::kAuto,
                                        to_size(staging_bytes, "staging_bytes"), sm_budget,
                                        to_size(launch_items_max, "launch_items_max")};
            const nb::gil_scoped_release released;
            new (place) CudaDevice(ordinal, options);
          },
          "ordinal"_a = 0, "mode"_a = "auto", "staging_bytes"_a = DeviceOptions{}.staging_bytes,
          "sm_budget"_a = 0, "launch_items_max"_a = DeviceOptions{}.launch_items_max)
      .def_static("count", &CudaDevice::count, unlocked, "Devices; 0 without a driver.")
      .def_static("missing", &CudaDevice::missing, unlocked, "Why there are none; empty if some.")
      .def_prop_ro("ordinal", &CudaDevice::ordinal, "Its number.")
      .def_prop_ro("name", &CudaDevice::name, "Its model.")
      .def_prop_ro("compute_capability", &CudaDevice::compute_capability, "Major and minor.")
      .def_prop_ro("sm_count", &CudaDevice::sm_count, "Multiprocessors.")
      .def_prop_ro("driver_version", &CudaDevice::driver_version,
                   "1000 * major + 10 * minor of the newest CUDA that the driver knows.")
      .def_prop_ro("sm_budget", &CudaDevice::sm_budget,
                   "CTAs of a copy kernel; 0: as many as its way needs.")
      .def_prop_ro("slot_bytes", &CudaDevice::slot_bytes,
                   "What a plane of a page may have at most for kernels to copy it.")
      .def_prop_ro("has_batch_copy", &CudaDevice::has_batch_copy,
                   "Whether the driver takes many copies in one call (12.8 and later).")
      .def_prop_ro("kernels", &CudaDevice::kernels,
                   "Which kernels it runs, such as \"cubin sm_90\"; empty if none.")
      .def_prop_ro("no_kernels", &CudaDevice::no_kernels, "Why there are none; else empty.")
      .def_prop_ro("failure", &CudaDevice::failure,
                   "The error that ended the device for this process; empty while it lives.")
      .def("register_host", &CudaDevice::register_host, "address"_a, "nbytes"_a, unlocked,
           "Page-lock host memory; gives a number for `unregister_host`.")
      .def("unregister_host", &CudaDevice::unregister_host, "number"_a, unlocked,
           "Undo it, after what is under way.")
      .def("memory_kind", &CudaDevice::memory_kind, "address"_a, "nbytes"_a, unlocked,
           "\"device\", \"host\" (page-locked), \"managed\" or \"unpinned\"; ValueError if mixed.")
      .def("device_address", &CudaDevice::device_address, "address"_a, "nbytes"_a, unlocked,
           "Where kernels find that memory; ValueError if they cannot reach it.")
      .def("allocate", &CudaDevice::allocate, "nbytes"_a, unlocked, "Memory of the device.")
      .def("free", &CudaDevice::free, "address"_a, unlocked, "Give it back.")
      .def("allocate_host", &CudaDevice::allocate_host, "nbytes"_a, unlocked,
           "Page-locked host memory.")
      .def("free_host", &CudaDevice::free_host, "address"_a, unlocked, "Give it back.")
      .def(
          "copy",
          [](CudaDevice& device, const U64Array& targets, const U64Array& sources,
             const U64Array& lengths, std::optional<StreamHandle> after) {
            const nb::gil_scoped_release released;
            return device.copy(to_span(targets), to_span(sources), to_span(lengths), after);
          },
          "targets"_a.noconvert(), "sources"_a.noconvert(), "lengths"_a.noconvert(),
          "after"_a = nb::none(), "Begin to copy pieces; `after` is a stream to follow.")
      .def(
          "launch",
          [](CudaDevice& device, const std::string& name, unsigned grid, unsigned block,
             unsigned shared_bytes, const nb::bytes& argument, std::optional<StreamHandle> after,
             std::optional<StreamHandle> stream) {
            const std::span bytes(static_cast<const std::byte*>(argument.data()), argument.size());
            const nb::gil_scoped_release released;
            return device.launch(name, grid, block, shared_bytes, bytes, after, stream);
          },
          "name"_a, "grid"_a, "block"_a, "shared_bytes"_a, "argument"_a, "after"_a = nb::none(),
          "stream"_a = nb::none(),
          "Launch a kernel with the bytes of its argument; `after` is a stream to follow, `stream` "
          "one to launch on.")
      .def("reserve_staging", &CudaDevice::reserve_staging, unlocked,
           "Take the staging memory of both directions now.")
      .def("release_staging", &CudaDevice::release_staging, unlocked,
           "Give it back, after what uses it; the next copy that needs it takes it again.")
      .def("create_stream", &CudaDevice::create_stream, unlocked, "A stream such as an engine has.")
      .def("destroy_stream", &CudaDevice::destroy_stream, "stream"_a, unlocked, "End it.")
      .def("synchronize", &CudaDevice::synchronize, "stream"_a, unlocked,
           "Return when the stream has done what is on it.")
      .def("close", &CudaDevice::close, unlocked,
           "Wait for what is under way and let go of everything; again, do nothing.");
  bind_plan(m);
}

}  // namespace kvtier::bindings
