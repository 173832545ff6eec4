// One CUDA device: pinned and registered host memory, copies, kernels, and what is under way on its
// streams.
//
// No CUDA is needed to build: the driver is found when the program runs (shim/cuda.hpp).
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvtier {

/// The device cannot be used, refused something, or has failed; in words, with the nearest errno.
class DeviceError : public std::runtime_error {
 public:
  DeviceError(int error_number, const std::string& words)
      : std::runtime_error(words), error_number_(error_number) {}
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

/// A stream as its owner's library knows it: a CUstream.
using StreamHandle = std::uint64_t;

namespace device {
class State;
class Work;
}  // namespace device

/// Copies under way, wave by wave in order. Any thread; may go away before they are over.
class DeviceJob {
 public:
  explicit DeviceJob(std::shared_ptr<device::Work> work);

  std::uint64_t nbytes() const;
  std::size_t wave_count() const;

  /// What is put on `stream` from now on waits for the wave, or with nothing for all; the host does
  /// not. Of a gather it is the pages that are waited for, which are then free again.
  ///
  /// @throws DeviceError the device has failed
  /// @throws std::invalid_argument there is no such wave, or the stream is another device's
  void order_after(StreamHandle stream, std::optional<std::size_t> wave) const;

  /// Whether the bytes of the wave, or of all, are in place. @throws DeviceError it has failed
  bool is_done(std::optional<std::size_t> wave) const;

  /// Sleep until all is in place; false when the time is over first. @throws DeviceError
  bool wait(std::chrono::nanoseconds timeout) const;

  /// Device time from the first copy's start to the last one's end, of a job that is done.
  double elapsed_s() const;

 private:
  std::shared_ptr<device::Work> work_;
};

/// Where kernels come from.
enum class KernelMode { kAuto, kJit };  // built in, else compiled here; always compiled here

/// How a device is used.
struct DeviceOptions {
  KernelMode kernels = KernelMode::kAuto;
  /// Device memory in which kernels and copy engines hand bytes to each other, of each direction;
  /// taken when it is first needed.
  std::uint64_t staging_bytes = std::uint64_t{64} << 20;
  /// CTAs of a copy kernel, so that it leaves the device to the engine. 0: 4 where bytes cross the
  /// bus, which that many fill; 8 otherwise.
  unsigned sm_budget = 0;
  /// Vectors (or bulk copies) of one launch: divisions are exact up to it. Less than that is for
  /// tests.
  std::uint64_t launch_items_max = (std::uint64_t{1} << 31) - 1;
};

/// One device, opened. Any thread. Its context is the primary one, as the CUDA runtime's and
/// torch's.
class CudaDevice {
 public:
  /// Devices that there are, and why there are none if there are none.
  static int count();
  static std::string missing();

  /// @throws DeviceError there is no driver or no such device, or it does not start
  /// @throws std::invalid_argument the staging is too small
  explicit CudaDevice(int ordinal, const DeviceOptions& options = {});
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  int ordinal() const;
  std::string name() const;
  std::pair<int, int> compute_capability() const;
  int sm_count() const;
  int driver_version() const;
  unsigned sm_budget() const;
  /// What a plane of a page may have at most for kernels to copy it.
  std::uint64_t slot_bytes() const;
  bool has_batch_copy() const;
  /// Which kernels it runs, such as "cubin sm_90"; empty if none, and then why.
  std::string kernels() const;
  std::string no_kernels() const;
  /// The error that ended the device for this process; empty while it lives.
  std::string failure() const;

  /// Page-lock host memory so that the device copies from and to it by itself.
  ///
  /// @return a number for `unregister_host`
  /// @throws std::invalid_argument it is empty, or overlaps memory that is registered
  /// @throws DeviceError the driver refuses
  std::uint64_t register_host(std::uint64_t address, std::uint64_t nbytes);
  /// Waits for what is under way first.
  void unregister_host(std::uint64_t number);

  /// "device", "host" (page-locked by anybody), "managed" or "unpinned".
  ///
  /// @throws std::invalid_argument a part of it is of another kind, or of another device
  std::string memory_kind(std::uint64_t address, std::uint64_t nbytes) const;
  /// Where kernels find that memory: page-locked memory may lie elsewhere for them.
  ///
  /// @throws std::invalid_argument  for memory that kernels do not reach, or not in one piece
  std::uint64_t device_address(std::uint64_t address, std::uint64_t nbytes) const;

  /// Memory of the device, and page-locked memory of the host; given back at `close` at the latest.
  std::uint64_t allocate(std::uint64_t nbytes);
  void free(std::uint64_t address);
  std::uint64_t allocate_host(std::uint64_t nbytes);
  void free_host(std::uint64_t address);

  /// Begin to copy pieces between memory of this device and page-locked host memory, or within the
  /// device; one wave. With `after`, when that stream has done what is on it now.
  ///
  /// @throws std::invalid_argument a piece lies elsewhere; nothing has begun
  /// @throws DeviceError it has failed; nothing is touched any more
  DeviceJob copy(std::span<const std::uint64_t> targets, std::span<const std::uint64_t> sources,
                 std::span<const std::uint64_t> lengths, std::optional<StreamHandle> after);

  /// Launch one of kvtier's kernels with the bytes of its argument. With `after`, when that stream
  /// has done what is on it now; on `stream`, else on one of the device's own.
  ///
  /// What the argument points to is the caller's to keep and to have checked.
  ///
  /// @throws std::invalid_argument there is no such kernel, or the launch has no such shape
  /// @throws DeviceError it has failed
  DeviceJob launch(const std::string& name, unsigned grid, unsigned block, unsigned shared_bytes,
                   std::span<const std::byte> argument, std::optional<StreamHandle> after,
                   std::optional<StreamHandle> stream);

  /// Take the staging memory of both directions now. @throws DeviceError there is not so much
  void reserve_staging();
  /// Give it back; the next copy that needs it takes it again.
  void release_staging();

  /// Streams such as an engine would have; for calibration and tests.
  StreamHandle create_stream();
  void destroy_stream(StreamHandle stream);
  void synchronize(StreamHandle stream);

  /// Wait for what is under way and let go of everything; again: nothing.
  void close();

  /// @throws DeviceError closed
  std::shared_ptr<device::State> state() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<device::State> state_;  // none once closed
};

}  // namespace kvtier
