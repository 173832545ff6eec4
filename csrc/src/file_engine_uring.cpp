// Segments through io_uring: one system call submits and awaits many, no thread of ours runs.
//
// By raw system calls, since all that is needed of liburing is these two hundred lines; the ring
// protocol is that of io_uring(7).
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "file_batch.hpp"

namespace kvtier {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

/// A part of the ring that is shared with the kernel.
class SharedPart {
 public:
  SharedPart(int fd, std::size_t nbytes, std::uint64_t offset)
      : nbytes_(nbytes),
        address_(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                      static_cast<off_t>(offset))) {
    if (address_ == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(), "cannot map an io_uring");
    }
  }
  ~SharedPart() { munmap(address_, nbytes_); }
  SharedPart(const SharedPart&) = delete;
  SharedPart& operator=(const SharedPart&) = delete;

  template <typename T>
  T* at(std::uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(address_) + offset);
  }

 private:
  std::size_t nbytes_;
  void* address_;
};

int set_up(std::uint32_t depth, io_uring_params& params) {
  const auto fd = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "io_uring_setup");
  return fd;
}

/// One submission and one completion queue, used by one thread at a time.
class Ring {
 public:
  explicit Ring(std::uint32_t depth)
      : fd_(set_up(depth, params_)),
        rings_(fd_.get(), std::max(sq_bytes(), cq_bytes()), IORING_OFF_SQ_RING),
        entries_(fd_.get(), params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
        segments_(depth) {
    // 5.6 brought plain reads and writes, and this flag with them; 5.4 the single mapping.
    if (!(params_.features & IORING_FEAT_RW_CUR_POS) ||
        !(params_.features & IORING_FEAT_SINGLE_MMAP)) {
      throw std::system_error(ENOSYS, std::generic_category(), "io_uring of this kernel");
    }
    sq_mask_ = *rings_.at<std::uint32_t>(params_.sq_off.ring_mask);
    cq_mask_ = *rings_.at<std::uint32_t>(params_.cq_off.ring_mask);
    free_slots_.reserve(depth);
    for (std::uint32_t slot = depth; slot-- > 0;) free_slots_.push_back(slot);
  }

  /// Run the batch until nothing of it is in flight, so that the caller's memory is its own again.
  void run(FileBatch& batch) {
    std::size_t in_flight = 0;
    bool more = true;
    while (true) {
      while (more && !free_slots_.empty()) {
        const std::uint32_t slot = free_slots_.back();
        more = batch.next(segments_[slot]);
        if (!more) break;
        free_slots_.pop_back();
        push(batch.operation(), slot);
        ++in_flight;
      }
      if (in_flight == 0) return;
      submit_and_wait();
      in_flight -= reap(batch);
    }
  }

 private:
  std::size_t sq_bytes() const {
    return params_.sq_off.array + params_.sq_entries * sizeof(std::uint32_t);
  }
  std::size_t cq_bytes() const {
    return params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe);
  }

  /// Queue a request for the rest of the slot's segment. There is always room: the queue has at
  /// least as many entries as there are slots.
  void push(FileOperation operation, std::uint32_t slot) {
    const FileSegment& segment = segments_[slot];
    const std::uint32_t tail = sq_tail_++;
    const std::uint32_t index = tail & sq_mask_;
    io_uring_sqe entry = {};
    entry.fd = segment.fd;
    entry.user_data = slot;
    if (is_sync(operation)) {
      entry.opcode = IORING_OP_FSYNC;
      if (operation == FileOperation::kDataSync) entry.fsync_flags = IORING_FSYNC_DATASYNC;
    } else {
      entry.opcode = operation == FileOperation::kRead ? IORING_OP_READ : IORING_OP_WRITE;
      entry.off = segment.offset;
      entry.addr = reinterpret_cast<std::uintptr_t>(segment.address);
      entry.len = static_cast<std::uint32_t>(segment.remaining);  // at most kSegmentBytesMax
    }
    *entries_.at<io_uring_sqe>(static_cast<std::uint32_t>(index * sizeof(io_uring_sqe))) = entry;
    rings_.at<std::uint32_t>(params_.sq_off.array)[index] = index;
    std::atomic_ref(*rings_.at<std::uint32_t>(params_.sq_off.tail))
        .store(sq_tail_, std::memory_order_release);
  }

  /// Hand over what is queued and wait for a completion.
  void submit_and_wait() {
    const auto head = std::atomic_ref(*rings_.at<std::uint32_t>(params_.sq_off.head))
                          .load(std::memory_order_acquire);
    const std::uint32_t queued = sq_tail_ - head;
    const auto entered = syscall(SYS_io_uring_enter, fd_.get(), queued, 1U, IORING_ENTER_GETEVENTS,
                                 nullptr, std::size_t{0});
    if (entered >= 0 || errno == EINTR) return;
    if (errno != EAGAIN && errno != EBUSY) {  // somebody closed the ring: nothing can be awaited
      throw std::system_error(errno, std::generic_category(), "io_uring_enter");
    }
    // Short of memory, or completions to be taken first: what is queued stays queued for the next
    // round. Never leave while the kernel may still write to the caller's memory.
    pollfd readable = {.fd = fd_.get(), .events = POLLIN, .revents = 0};
    poll(&readable, 1, kPauseMs);
  }

  /// Take completions; segments that need more go back into the queue.
  ///
  /// @return how many segments have ended
  std::size_t reap(FileBatch& batch) {
    auto shared_head = std::atomic_ref(*rings_.at<std::uint32_t>(params_.cq_off.head));
    const auto tail = std::atomic_ref(*rings_.at<std::uint32_t>(params_.cq_off.tail))
                          .load(std::memory_order_acquire);
    const io_uring_cqe* const completions = rings_.at<io_uring_cqe>(params_.cq_off.cqes);
    std::uint32_t head = shared_head.load(std::memory_order_relaxed);  // only this thread moves it
    std::size_t ended = 0;
    for (; head != tail; ++head) {
      const io_uring_cqe& completion = completions[head & cq_mask_];
      const auto slot = static_cast<std::uint32_t>(completion.user_data);
      FileSegment& segment = segments_[slot];
      if (!advance(batch.operation(), segment, completion.res)) {
        push(batch.operation(), slot);
        continue;
      }
      batch.settle(segment);
      free_slots_.push_back(slot);
      ++ended;
    }
    shared_head.store(head, std::memory_order_release);
    return ended;
  }

  static constexpr int kPauseMs = 10;

  io_uring_params params_ = {};  // first: the others are made from it
  FileDescriptor fd_;
  SharedPart rings_;
  SharedPart entries_;
  std::vector<FileSegment> segments_;
  std::vector<std::uint32_t> free_slots_;
  std::uint32_t sq_tail_ = 0;
  std::uint32_t sq_mask_ = 0;
  std::uint32_t cq_mask_ = 0;
};

/// Rings for the calls in progress, made when first needed and kept.
class UringRunner final : public FileRunner {
 public:
  explicit UringRunner(std::uint32_t depth) : depth_(depth) {
    idle_.reserve(FileEngine::kCallsMax);  // so that giving a ring back cannot fail
    idle_.push_back(std::make_unique<Ring>(depth));
    ring_count_ = 1;
  }

  void run(FileBatch& batch) override {
    std::unique_ptr<Ring> ring = take();
    try {
      ring->run(batch);
    } catch (...) {
      give_back(nullptr);
      throw;
    }
    give_back(std::move(ring));
  }

 private:
  std::unique_ptr<Ring> take() {
    std::unique_lock lock(mutex_);
    if (idle_.empty() && ring_count_ < FileEngine::kCallsMax) {
      try {
        auto ring = std::make_unique<Ring>(depth_);
        ++ring_count_;
        return ring;
      } catch (const std::system_error&) {
        // No more rings for this process (descriptors, locked memory): share those there are.
        if (ring_count_ == 0) throw;
      }
    }
    returned_.wait(lock, [this] { return !idle_.empty() || ring_count_ == 0; });
    if (idle_.empty()) throw std::system_error(EIO, std::generic_category(), "io_uring");
    std::unique_ptr<Ring> ring = std::move(idle_.back());
    idle_.pop_back();
    return ring;
  }

  /// With nothing, a ring that broke: the next call makes another.
  void give_back(std::unique_ptr<Ring> ring) {
    const std::lock_guard lock(mutex_);
    if (ring) {
      idle_.push_back(std::move(ring));
    } else {
      --ring_count_;
    }
    returned_.notify_one();
  }

  const std::uint32_t depth_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Ring>> idle_;
  std::uint32_t ring_count_ = 0;
};

}  // namespace

std::shared_ptr<FileRunner> make_uring_runner(std::uint32_t depth) {
  return std::make_shared<UringRunner>(depth);
}

}  // namespace kvtier
