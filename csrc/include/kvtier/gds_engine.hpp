// Batches of reads and writes between files and GPU or host memory, by cuFile: GPUDirect Storage.
//
// The same batches as `FileEngine`, whose items may then lie in memory of a GPU. cuFile's plain
// calls block, so they run on threads: the way that every file system and driver supports.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>

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

/// Runs batches on `threads` threads of its own. Any thread, several at once.
class GdsEngine {
 public:
  /// Open cuFile's driver with the library of KVTIER_CUFILE_LIBRARY, the system's, or `wheel_path`.
  ///
  /// @throws GdsError there is none, or it does not open
  /// @throws std::invalid_argument as `FileEngine`
  GdsEngine(std::uint32_t threads, std::uint64_t segment_bytes, const std::string& wheel_path);
  ~GdsEngine();
  GdsEngine(const GdsEngine&) = delete;
  GdsEngine& operator=(const GdsEngine&) = delete;

  /// Make an open file known; it stays open until `remove_file`. @throws GdsError
  void add_file(int fd);
  void remove_file(int fd);

  /// Make memory known, so that each transfer need not; any number of times for one address.
  ///
  /// @return whether it is registered; memory that overlaps other memory works without
  /// @throws GdsError
  bool add_memory(std::uint64_t address, std::uint64_t nbytes);
  /// Undo one `add_memory` that was true.
  void remove_memory(std::uint64_t address);

  /// As those of `FileEngine`; items are in known files, and failures may be cuFile's own codes.
  void read(std::span<const FileTransfer> items, std::span<std::int64_t> results,
            StopFlag* stop = nullptr);
  void write(std::span<const FileTransfer> items, std::span<std::int64_t> results,
             StopFlag* stop = nullptr);

  /// Wait for the calls in progress, forget all files and memory, close the driver; again: nothing.
  void close();

  const std::string& library_path() const { return path_; }

  /// The errno nearest to a failure's code, and what the code means.
  static int error_number_of(int code);
  static std::string words_of(int code);

 private:
  class State;

  std::shared_ptr<State> state();
  /// @throws std::invalid_argument closed
  std::shared_ptr<State> open_state();

  std::string path_;
  std::mutex mutex_;
  std::shared_ptr<State> state_;  // none once closed
  std::unique_ptr<FileEngine> engine_;
};

}  // namespace kvtier
