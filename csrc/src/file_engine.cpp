#include "kvtier/file_engine.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "file_batch.hpp"

namespace kvtier {
namespace {

// An interrupted or postponed request is repeated this often before its errno is the result: far
// above what a busy kernel answers, and an end where a descriptor is non-blocking by mistake.
constexpr std::uint32_t kRetriesMax = 1000;
constexpr std::uint64_t kFileBytesMax = std::numeric_limits<std::int64_t>::max();

/// Whether a file has nothing at `offset`, so that a short read was its end. O_DIRECT refuses to
/// read on at the odd offset where such a file ends, so asking again would be an error.
bool ends_before(int fd, std::uint64_t offset) {
  struct stat status = {};
  return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
         std::cmp_less_equal(status.st_size, offset);
}

void check_segment_bytes(std::uint64_t segment_bytes) {
  if (segment_bytes < FileEngine::kSegmentBytesMin ||
      segment_bytes > FileEngine::kSegmentBytesMax ||
      segment_bytes % FileEngine::kSegmentBytesMin != 0) {
    throw std::invalid_argument("segments of " + std::to_string(segment_bytes) +
                                " bytes, a multiple of 4096 up to " +
                                std::to_string(FileEngine::kSegmentBytesMax));
  }
}

std::int64_t allocate_one(int fd, std::uint64_t length) {
  if (length == 0) return 0;  // which fallocate takes for a mistake
  std::uint32_t retries = 0;
  while (fallocate(fd, 0, 0, static_cast<off_t>(length)) != 0) {
    if (errno == EINTR && ++retries < kRetriesMax) continue;
    return errno == EOPNOTSUPP || errno == ENOSYS ? 0 : -errno;
  }
  return 0;
}

}  // namespace

bool advance(FileOperation operation, FileSegment& segment, std::int64_t result) {
  if (result < 0) {
    const int error = static_cast<int>(-result);
    if ((error == EINTR || error == EAGAIN) && ++segment.retries < kRetriesMax) return false;
    segment.error = error;
    return true;
  }
  if (is_sync(operation)) return true;
  const auto moved = std::min(static_cast<std::uint64_t>(result), segment.remaining);
  segment.offset += moved;
  segment.address += moved;
  segment.item_offset += moved;
  segment.remaining -= moved;
  segment.moved += moved;
  segment.retries = 0;
  if (segment.remaining == 0) return true;
  if (operation == FileOperation::kRead)
    return moved == 0 || ends_before(segment.fd, segment.offset);
  if (moved > 0) return false;
  segment.error = EIO;  // a write that moves nothing and names no reason
  return true;
}

FileBatch::FileBatch(FileOperation operation, std::span<const FileTransfer> items,
                     std::uint64_t segment_bytes, std::span<std::int64_t> results, StopFlag* stop)
    : operation_(operation),
      items_(items),
      segment_bytes_(segment_bytes),
      results_(results),
      stop_(stop) {
  for (std::size_t i = 0; i < items_.size(); ++i) {
    results_[i] = static_cast<std::int64_t>(items_[i].length);
  }
}

bool FileBatch::next(FileSegment& segment) {
  if (stop_ != nullptr && stop_->is_set()) give_up();
  for (; item_ < items_.size(); ++item_, item_offset_ = 0) {
    const FileTransfer& item = items_[item_];
    // Nothing more to ask of an item that failed, or whose file ended before here.
    const bool is_over =
        results_[item_] < 0 || std::cmp_greater_equal(item_offset_, results_[item_]);
    if (is_over && !(is_sync(operation_) && item_offset_ == 0)) continue;
    const std::uint64_t length = std::min(segment_bytes_, item.length - item_offset_);
    segment = FileSegment{.item = item_,
                          .fd = item.fd,
                          .offset = item.offset + item_offset_,
                          .address = item.address + item_offset_,
                          .remaining = length,
                          .item_offset = item_offset_};
    item_offset_ += is_sync(operation_) ? 1 : length;
    ++in_flight_;
    return true;
  }
  return false;
}

void FileBatch::give_up() {
  for (; item_ < items_.size(); ++item_, item_offset_ = 0) {
    const bool is_cut = item_offset_ < items_[item_].length;
    if (is_cut && results_[item_] >= 0) results_[item_] = -ECANCELED;
  }
}

void FileBatch::settle(const FileSegment& segment) {
  --in_flight_;
  if (stop_ != nullptr && segment.error == 0) stop_->add_moved(segment.moved);
  std::int64_t& result = results_[segment.item];
  if (result < 0) return;  // the first error stands
  if (segment.error != 0) {
    result = -segment.error;
  } else if (segment.remaining > 0) {  // the file ended; of several ends the first counts
    result = std::min(result, static_cast<std::int64_t>(segment.item_offset));
  }
}

/// Holds the engine open while it lives.
class FileEngine::Call {
 public:
  explicit Call(FileEngine& engine) : engine_(engine) {
    const std::lock_guard lock(engine_.mutex_);
    if (!engine_.runner_) throw std::invalid_argument("the file engine is closed");
    runner_ = engine_.runner_;
    ++engine_.calls_;
  }
  ~Call() {
    const std::lock_guard lock(engine_.mutex_);
    if (--engine_.calls_ == 0) engine_.idle_.notify_all();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void run(FileOperation operation, std::span<const FileTransfer> items,
           std::span<std::int64_t> results, StopFlag* stop = nullptr) {
    if (items.size() != results.size()) {
      throw std::invalid_argument(std::to_string(results.size()) + " results for " +
                                  std::to_string(items.size()) + " items");
    }
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (items[i].offset > kFileBytesMax || items[i].length > kFileBytesMax - items[i].offset) {
        throw std::invalid_argument("item " + std::to_string(i) +
                                    " ends past what a file can hold");
      }
    }
    FileBatch batch(operation, items, engine_.segment_bytes_, results, stop);
    runner_->run(batch);
  }

 private:
  FileEngine& engine_;
  std::shared_ptr<FileRunner> runner_;
};

FileEngine::FileEngine(std::uint64_t segment_bytes, std::shared_ptr<FileRunner> runner)
    : segment_bytes_(segment_bytes), method_(FileMethod::kThreads), runner_(std::move(runner)) {
  check_segment_bytes(segment_bytes);
}

FileEngine::FileEngine(std::uint32_t depth, std::uint64_t segment_bytes, FileMethod method)
    : segment_bytes_(segment_bytes), method_(method) {
  if (depth < 1 || depth > kDepthMax) {
    throw std::invalid_argument("depth of " + std::to_string(depth) + ", between 1 and " +
                                std::to_string(kDepthMax));
  }
  check_segment_bytes(segment_bytes);
  if (method_ != FileMethod::kThreads) {
    try {
      runner_ = make_uring_runner(depth);
      method_ = FileMethod::kUring;
    } catch (const std::system_error&) {
      if (method == FileMethod::kUring) throw;
      method_ = FileMethod::kThreads;
    }
  }
  if (!runner_) runner_ = make_thread_runner(depth, request_of_system);
}

FileEngine::~FileEngine() { close(); }

void FileEngine::read(std::span<const FileTransfer> items, std::span<std::int64_t> results,
                      StopFlag* stop) {
  Call(*this).run(FileOperation::kRead, items, results, stop);
}

void FileEngine::write(std::span<const FileTransfer> items, std::span<std::int64_t> results,
                       StopFlag* stop) {
  Call(*this).run(FileOperation::kWrite, items, results, stop);
}

void FileEngine::allocate(std::span<const int> fds, std::span<const std::uint64_t> lengths,
                          std::span<std::int64_t> results) {
  if (fds.size() != lengths.size() || fds.size() != results.size()) {
    throw std::invalid_argument(std::to_string(fds.size()) + " descriptors, " +
                                std::to_string(lengths.size()) + " lengths");
  }
  const Call call(*this);
  for (std::size_t i = 0; i < fds.size(); ++i) {
    results[i] = lengths[i] > kFileBytesMax ? -EFBIG : allocate_one(fds[i], lengths[i]);
  }
}

void FileEngine::sync(std::span<const int> fds, bool data_only, std::span<std::int64_t> results) {
  std::vector<FileTransfer> items;
  items.reserve(fds.size());
  for (const int fd : fds) items.push_back({fd, 0, nullptr, 0});
  Call(*this).run(data_only ? FileOperation::kDataSync : FileOperation::kSync, items, results);
}

void FileEngine::close() {
  std::shared_ptr<FileRunner> last;  // its threads are joined after the lock
  std::unique_lock lock(mutex_);
  last.swap(runner_);
  idle_.wait(lock, [this] { return calls_ == 0; });
  lock.unlock();
}

FileMethod parse_file_method(std::string_view name) {
  for (const FileMethod method : {FileMethod::kAuto, FileMethod::kUring, FileMethod::kThreads}) {
    if (name == file_method_name(method)) return method;
  }
  throw std::invalid_argument("no file method '" + std::string(name) + "': auto, uring or threads");
}

std::string_view file_method_name(FileMethod method) {
  switch (method) {
    case FileMethod::kAuto:
      return "auto";
    case FileMethod::kUring:
      return "uring";
    case FileMethod::kThreads:
      return "threads";
  }
  return "";
}

}  // namespace kvtier
