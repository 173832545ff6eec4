// Batches of reads and writes between files and GPU or host memory, by cuFile: GPUDirect Storage.
//
// The same batches as `FileEngine`, whose items may then lie in memory of a GPU.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "kvtier/file_engine.hpp"
#include "kvtier/stop_flag.hpp"

namespace kvtier {

/// cuFile cannot be used here, or refused something; in words, with the errno nearest to it.
class GdsError : public std::runtime_error {
 public:
  GdsError(int error_number, const std::string& words)
      : std::runtime_error(words), error_number_(error_number) {}
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

namespace gds {
class State;
}

enum class GdsMode {
  kThreads,  // blocking calls on threads: what every file system and driver supports
  kStreams,  // operations on CUDA streams; of GPU memory only
};

/// Runs batches with `depth` segments in flight: of all batches together on as many threads, or of
/// each batch on streams of its own. Any thread, several at once.
class GdsEngine {
 public:
  /// Open cuFile's driver with the library of KVTIER_CUFILE_LIBRARY, the system's, or `wheel_path`.
  ///
  /// @throws GdsError there is none, it does not open, or it cannot do what `mode` needs
  /// @throws std::invalid_argument as `FileEngine`
  GdsEngine(std::uint32_t depth, std::uint64_t segment_bytes, const std::string& wheel_path,
            GdsMode mode);
  ~GdsEngine();
  GdsEngine(const GdsEngine&) = delete;
  GdsEngine& operator=(const GdsEngine&) = delete;

  /// Make an open file known; it stays open until `remove_file`. @throws GdsError
  void add_file(int fd);
  void remove_file(int fd);

  /// Make memory known, of a GPU if `device` says of which; any number of times for one address.
  ///
  /// It is registered, so that no transfer need do it. Where it overlaps other memory it works
  /// without; host memory that cannot be registered goes through buffers that are.
  ///
  /// @return a number for `remove_memory`
  /// @throws GdsError
  std::uint64_t add_memory(std::uint64_t address, std::uint64_t nbytes, std::optional<int> device);
  void remove_memory(std::uint64_t address, std::uint64_t number);

  /// As those of `FileEngine`; items are in known files and memory, and failures may be codes of
  /// cuFile's or CUDA's, of which `error_number_of` and `words_of` know.
  void read(std::span<const FileTransfer> items, std::span<std::int64_t> results,
            StopFlag* stop = nullptr);
  void write(std::span<const FileTransfer> items, std::span<std::int64_t> results,
             StopFlag* stop = nullptr);

  /// Wait for the calls in progress, forget all files and memory, close the driver; again: nothing.
  void close();

  const std::string& library_path() const { return path_; }
  /// Why GPU memory cannot be served; empty if it can.
  const std::string& no_cuda() const { return no_cuda_; }

  /// The errno nearest to a failure's code, and what the code means.
  static int error_number_of(int code);
  std::string words_of(int code);

 private:
  std::shared_ptr<gds::State> state();
  /// @throws std::invalid_argument closed
  std::shared_ptr<gds::State> open_state();

  std::string path_;
  std::string no_cuda_;
  std::mutex mutex_;
  std::shared_ptr<gds::State> state_;  // none once closed
  std::unique_ptr<FileEngine> engine_;
};

/// "threads" or "async"; @throws std::invalid_argument another word
GdsMode parse_gds_mode(std::string_view name);

}  // namespace kvtier
