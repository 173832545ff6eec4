// What both ways of running a batch share: cutting it into segments and adding up their results.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kvtier/file_engine.hpp"

namespace kvtier {

enum class FileOperation { kRead, kWrite, kSync, kDataSync };

/// Whether the operation moves no bytes: one request an item.
constexpr bool is_sync(FileOperation operation) {
  return operation == FileOperation::kSync || operation == FileOperation::kDataSync;
}

/// A piece of one item that is handed to the kernel as one request.
struct FileSegment {
  std::size_t item = 0;
  int fd = -1;
  std::uint64_t offset = 0;       // in the file, of the next byte to move
  std::byte* address = nullptr;   // of the next byte to move
  std::uint64_t remaining = 0;    // 0 for a sync
  std::uint64_t item_offset = 0;  // of the next byte to move, from the item's start
  std::uint64_t moved = 0;        // so far
  std::uint32_t retries = 0;      // without progress
  int error = 0;                  // errno that ended it
};

/// Apply what a request for the rest of `segment` answered: bytes moved or -errno.
///
/// @return whether the segment has ended; if not, the same request is to be made again
bool advance(FileOperation operation, FileSegment& segment, std::int64_t result);

/// One call's items, handed out segment by segment in order. Not thread-safe.
class FileBatch {
 public:
  FileBatch(FileOperation operation, std::span<const FileTransfer> items,
            std::uint64_t segment_bytes, std::span<std::int64_t> results, StopFlag* stop);

  FileOperation operation() const { return operation_; }

  /// The next segment to start; false when all have been handed out.
  bool next(FileSegment& segment);

  /// Take back a segment that has ended.
  void settle(const FileSegment& segment);

  /// All segments were handed out and have ended: the results are final.
  bool done() const { return item_ == items_.size() && in_flight_ == 0; }

 private:
  /// Hand out nothing more; what is not all handed out is -ECANCELED.
  void give_up();

  FileOperation operation_;
  std::span<const FileTransfer> items_;
  std::uint64_t segment_bytes_;
  std::span<std::int64_t> results_;
  StopFlag* stop_;                 // none: nobody stops it
  std::size_t item_ = 0;           // being handed out
  std::uint64_t item_offset_ = 0;  // handed out of it so far
  std::size_t in_flight_ = 0;
};

class FileRunner {
 public:
  virtual ~FileRunner() = default;
  /// Run the batch until it is done. Any thread.
  virtual void run(FileBatch& batch) = 0;
};

/// Makes one request, and blocks until it is answered: bytes moved or -errno.
using FileRequest = std::function<std::int64_t(FileOperation, const FileSegment&)>;

/// @throws std::system_error the kernel does not allow io_uring here
std::shared_ptr<FileRunner> make_uring_runner(std::uint32_t depth);
std::shared_ptr<FileRunner> make_thread_runner(std::uint32_t depth, FileRequest request);
/// pread, pwrite, fsync and fdatasync.
std::int64_t request_of_system(FileOperation operation, const FileSegment& segment);

}  // namespace kvtier
