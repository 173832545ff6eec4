// Batches of reads and writes on open files, cut into segments that run many at a time.
//
// Disk backends stand on it. One 32 MiB read alone leaves a disk waiting most of the time; 16
// segments of 1 MiB in flight reach what it can do, whichever of the two methods runs them.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>

#include "kvtier/stop_flag.hpp"

namespace kvtier {

/// One positional read or write; the caller keeps the descriptor open and the memory alive.
struct FileTransfer {
  int fd;
  std::uint64_t offset;
  std::byte* address;  // a write only reads from it
  std::uint64_t length;
};

enum class FileMethod {
  kAuto,     // kUring where the kernel allows it, else kThreads
  kUring,    // io_uring, by system call: least CPU at small segments
  kThreads,  // own threads with pread and pwrite: works everywhere
};

/// How a `FileEngine` gets segments done; one implementation per `FileMethod`.
class FileRunner;

/// Runs batches; every item gets a result, and one item's fault spoils no other.
///
/// Any thread, several at once. Each call keeps up to `depth` segments in flight of its own
/// (kUring; at most `kCallsMax` calls at a time, later ones wait), or shares `depth` threads with
/// the others (kThreads). Segments keep the alignment of their item, so O_DIRECT's demands on
/// address, offset and length are the caller's business.
class FileEngine {
 public:
  static constexpr std::uint32_t kDepthMax = 1024;
  static constexpr std::uint64_t kSegmentBytesMin = 4096;
  static constexpr std::uint64_t kSegmentBytesMax = std::uint64_t{1} << 30;
  static constexpr std::uint32_t kCallsMax = 8;

  /// @throws std::invalid_argument depth or segment out of bounds, or no whole number of 4 KiB
  /// @throws std::system_error kUring was asked for and the kernel does not allow it
  FileEngine(std::uint32_t depth, std::uint64_t segment_bytes, FileMethod method);
  /// With a way of its own to get segments done. @throws std::invalid_argument as above
  FileEngine(std::uint64_t segment_bytes, std::shared_ptr<FileRunner> runner);
  ~FileEngine();
  FileEngine(const FileEngine&) = delete;
  FileEngine& operator=(const FileEngine&) = delete;

  /// Read each item; `results[i]` is its bytes, fewer where the file ends, or -errno.
  ///
  /// Short transfers go on where they stopped; interrupted ones are repeated. After an error the
  /// rest of that item is not tried. Returns when nothing is in flight any more.
  ///
  /// @param stop  once set, no further segment is begun, and an item that lacks one is -ECANCELED
  /// @throws std::invalid_argument closed, sizes differ, or an offset past what files can have
  void read(std::span<const FileTransfer> items, std::span<std::int64_t> results,
            StopFlag* stop = nullptr);

  /// Write each item, like `read`; anything less than its whole length is an error.
  void write(std::span<const FileTransfer> items, std::span<std::int64_t> results,
             StopFlag* stop = nullptr);

  /// Give each file its final size and room on the disk ahead of the writes; 0 or -errno.
  ///
  /// Without it each write past the file's end waits for the one before and costs up to ten times
  /// the CPU; with it a full disk says so before anything is written. A file system that cannot
  /// is no error. One system call a file, one after the other.
  void allocate(std::span<const int> fds, std::span<const std::uint64_t> lengths,
                std::span<std::int64_t> results);

  /// Bring each file to stable storage; `results[i]` is 0 or -errno.
  ///
  /// `data_only` is fdatasync: enough to find a file's bytes again, not a folder's new names.
  void sync(std::span<const int> fds, bool data_only, std::span<std::int64_t> results);

  /// Wait for the calls in progress and release everything; later calls are refused.
  void close();

  /// kUring or kThreads, never kAuto.
  FileMethod method() const { return method_; }

 private:
  class Call;

  std::uint64_t segment_bytes_;
  FileMethod method_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::shared_ptr<FileRunner> runner_;  // none once closed
  std::uint32_t calls_ = 0;
};

/// "auto", "uring" or "threads"; @throws std::invalid_argument another word
FileMethod parse_file_method(std::string_view name);
std::string_view file_method_name(FileMethod method);

}  // namespace kvtier
