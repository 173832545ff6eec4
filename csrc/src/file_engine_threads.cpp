// Segments by own threads with pread and pwrite: what works on every kernel and in every sandbox.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "file_batch.hpp"

namespace kvtier {

std::int64_t request_of_system(FileOperation operation, const FileSegment& segment) {
  ssize_t result = -1;
  switch (operation) {
    case FileOperation::kRead:
      result =
          pread(segment.fd, segment.address, segment.remaining, static_cast<off_t>(segment.offset));
      break;
    case FileOperation::kWrite:
      result = pwrite(segment.fd, segment.address, segment.remaining,
                      static_cast<off_t>(segment.offset));
      break;
    case FileOperation::kSync:
      result = fsync(segment.fd);
      break;
    case FileOperation::kDataSync:
      result = fdatasync(segment.fd);
      break;
  }
  return result < 0 ? -errno : result;
}

namespace {

/// `depth` threads over a queue of batches, the oldest batch first; asleep when there is none.
class ThreadRunner final : public FileRunner {
 public:
  ThreadRunner(std::uint32_t depth, FileRequest request) : request_(std::move(request)) {
    threads_.reserve(depth);
    for (std::uint32_t i = 0; i < depth; ++i) {
      threads_.emplace_back([this](std::stop_token stop) { work(std::move(stop)); });
    }
  }

  void run(FileBatch& batch) override {
    std::unique_lock lock(mutex_);
    waiting_.push_back(&batch);
    work_.notify_all();
    finished_.wait(lock, [&batch] { return batch.done(); });
    std::erase(waiting_, &batch);  // one with no segment at all is never taken off by a thread
  }

 private:
  void work(std::stop_token stop) {
    std::unique_lock lock(mutex_);
    while (work_.wait(lock, stop, [this] { return !waiting_.empty(); })) {
      FileBatch& batch = *waiting_.front();
      FileSegment segment;
      if (!batch.next(segment)) {
        waiting_.pop_front();  // all handed out; those in flight end without the queue
        if (batch.done()) finished_.notify_all();
        continue;
      }
      const FileOperation operation = batch.operation();
      lock.unlock();
      while (!advance(operation, segment, request_(operation, segment))) {
      }
      lock.lock();
      batch.settle(segment);  // its caller cannot have left: this segment was in flight
      if (batch.done()) finished_.notify_all();
    }
  }

  const FileRequest request_;
  std::mutex mutex_;
  std::condition_variable_any work_;
  std::condition_variable finished_;
  std::deque<FileBatch*> waiting_;     // owned by the callers, who wait in `run`
  std::vector<std::jthread> threads_;  // last: they end before what they use
};

}  // namespace

std::shared_ptr<FileRunner> make_thread_runner(std::uint32_t depth, FileRequest request) {
  return std::make_shared<ThreadRunner>(depth, std::move(request));
}

}  // namespace kvtier
