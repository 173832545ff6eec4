#include "gds_streams.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "gds_codes.hpp"
#include "kvtier/gds_engine.hpp"

namespace kvtier::gds {
namespace {

constexpr std::uint32_t kLanesMax = 8;  // twice what calls at a time, so that some may break
constexpr ssize_t kNotAnswered = std::numeric_limits<ssize_t>::min();

/// A non-blocking stream in a GPU's context, known to cuFile.
class Stream {
 public:
  Stream(const State& state, cuda::Context context) : state_(state), context_(context) {
    const cuda::CurrentContext current(state_.cuda(), context_);
    code_ = code_of_cuda(current.result());
    if (code_ == 0) {
      code_ = code_of_cuda(state_.cuda().stream_create(&stream_, cuda::kNonBlocking));
    }
    if (code_ != 0) return;
    code_ = code_of(state_.cufile().stream_register(stream_, cufile::kStreamFixedInputs));
    if (code_ != 0) state_.cuda().stream_destroy(stream_);
  }
  ~Stream() {
    if (code_ != 0) return;
    const cuda::CurrentContext current(state_.cuda(), context_);
    state_.cufile().stream_deregister(stream_);
    state_.cuda().stream_destroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Why it cannot be used; 0 if it can.
  int code() const { return code_; }
  cuda::Stream get() const { return stream_; }

  /// Wait for all that is on it. @return 0, or why that failed
  int synchronize() const {
    const cuda::CurrentContext current(state_.cuda(), context_);
    if (current.result() != 0) return code_of_cuda(current.result());
    return code_of_cuda(state_.cuda().stream_synchronize(stream_));
  }

 private:
  const State& state_;
  cuda::Context context_;
  cuda::Stream stream_ = nullptr;
  int code_ = 0;
};

/// Up to `size` segments that are submitted together and awaited together.
class Wave {
 public:
  Wave(const State& state, std::size_t size) : state_(state), calls_(size) {}

  bool is_empty() const { return busy_ == 0; }
  /// A stream failed: what it was told of stays where it is, since it may yet be looked at.
  bool is_broken() const { return broken_ != 0; }

  /// Submit what is left of earlier segments, then new ones as long as there is room.
  void fill(FileBatch& batch) {
    for (Call& call : calls_) {
      if (!call.is_busy) {
        if (!batch.next(call.segment)) continue;
        call.is_busy = true;
        ++busy_;
      }
      call.failure = is_broken() ? broken_ : submit(batch.operation(), call);
    }
  }

  void wait() const {
    for (const auto& [context, stream] : streams_) stream->synchronize();
  }

  /// Wait for what was submitted, and settle the segments that have ended.
  void drain(FileBatch& batch) {
    std::map<cuda::Context, int> ends;  // of each stream
    for (const auto& [context, stream] : streams_) {
      const int end = ends[context] = stream->synchronize();
      if (end != 0 && !is_broken()) broken_ = end;
    }
    for (Call& call : calls_) {
      if (!call.is_busy) continue;
      std::int64_t result = -call.failure;
      if (result == 0) {
        const int end = ends[call.context];
        result = end != 0 ? -end : answer_of(call.moved);
      }
      if (!advance(batch.operation(), call.segment, result)) continue;  // `fill` submits the rest
      batch.settle(call.segment);
      call.is_busy = false;
      --busy_;
    }
  }

 private:
  /// One segment, and what cuFile is given pointers to until the stream has passed it.
  struct Call {
    FileSegment segment;
    bool is_busy = false;
    int failure = 0;  // it was not submitted for this
    cuda::Context context = nullptr;
    std::size_t nbytes = 0;
    off_t file_offset = 0;
    off_t buffer_offset = 0;
    ssize_t moved = kNotAnswered;
  };

  /// @return 0, or why it was not submitted
  int submit(FileOperation operation, Call& call) {
    if (is_sync(operation)) return EINVAL;
    const std::optional<Access> access = state_.find(call.segment);
    if (!access) return EBADF;
    if (access->context == nullptr) return EFAULT;  // not of a GPU
    std::unique_ptr<Stream>& stream = streams_[access->context];
    if (!stream) stream = std::make_unique<Stream>(state_, access->context);
    if (const int code = stream->code(); code != 0) {
      streams_.erase(access->context);  // the next one may have more luck
      return code;
    }
    call.context = access->context;
    call.nbytes = call.segment.remaining;
    call.file_offset = static_cast<off_t>(call.segment.offset);
    call.buffer_offset = access->buffer_offset;
    call.moved = kNotAnswered;
    const cuda::CurrentContext current(state_.cuda(), access->context);
    if (current.result() != 0) return code_of_cuda(current.result());
    const auto start = operation == FileOperation::kRead ? state_.cufile().read_async
                                                         : state_.cufile().write_async;
    return code_of(start(access->file, access->base, &call.nbytes, &call.file_offset,
                         &call.buffer_offset, &call.moved, stream->get()));
  }

  static std::int64_t answer_of(ssize_t moved) {
    // A stream has no errno; and what it never wrote has not arrived.
    return moved == -1 || moved == kNotAnswered ? -EIO : moved;
  }

  const State& state_;
  std::vector<Call> calls_;  // never moved
  std::size_t busy_ = 0;
  int broken_ = 0;  // why
  std::map<cuda::Context, std::unique_ptr<Stream>> streams_;
};

/// What one batch at a time runs on.
class Lane {
 public:
  Lane(const State& state, std::uint32_t depth)
      : waves_{Wave(state, (depth + 1) / 2), Wave(state, std::max(depth / 2, 1U))} {}

  void run(FileBatch& batch) {
    for (Wave& wave : waves_) wave.fill(batch);
    for (std::size_t turn = 0; !(waves_[0].is_empty() && waves_[1].is_empty()); turn ^= 1) {
      if (waves_[turn].is_empty()) continue;
      waves_[turn].drain(batch);
      waves_[turn].fill(batch);
    }
  }

  /// Until nothing is on its streams.
  void wait() const {
    for (const Wave& wave : waves_) wave.wait();
  }

  bool is_broken() const { return waves_[0].is_broken() || waves_[1].is_broken(); }

 private:
  std::array<Wave, 2> waves_;
};

/// Lanes for the batches in progress, made when first needed and kept.
class StreamRunner final : public FileRunner {
 public:
  StreamRunner(std::shared_ptr<State> state, std::uint32_t depth)
      : state_(std::move(state)), depth_(depth) {
    lanes_.reserve(kLanesMax);
    idle_.reserve(kLanesMax);  // so that giving a lane back cannot fail
  }

  void run(FileBatch& batch) override {
    Lane& lane = take();
    try {
      lane.run(batch);
    } catch (...) {  // out of memory
      lane.wait();   // what was submitted uses the caller's memory
      give_back(nullptr);
      throw;
    }
    give_back(lane.is_broken() ? nullptr : &lane);
  }

 private:
  /// With nothing, a lane that is not to be used again.
  void give_back(Lane* lane) {
    const std::lock_guard lock(mutex_);
    --busy_;
    if (lane != nullptr) idle_.push_back(lane);
    returned_.notify_all();
  }

  Lane& take() {
    std::unique_lock lock(mutex_);
    if (idle_.empty() && lanes_.size() < kLanesMax) {
      idle_.push_back(lanes_.emplace_back(std::make_unique<Lane>(*state_, depth_)).get());
    }
    returned_.wait(lock, [this] { return !idle_.empty() || busy_ == 0; });
    if (idle_.empty()) {  // as many failures of streams as lanes: CUDA is beyond help here
      throw GdsError(EIO, "all CUDA streams broke");
    }
    Lane& lane = *idle_.back();
    idle_.pop_back();
    ++busy_;
    return lane;
  }

  const std::shared_ptr<State> state_;
  const std::uint32_t depth_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<Lane*> idle_;
  std::size_t busy_ = 0;
  std::vector<std::unique_ptr<Lane>> lanes_;  // broken ones, too; last: they use the state
};

}  // namespace

std::shared_ptr<FileRunner> make_stream_runner(std::shared_ptr<State> state, std::uint32_t depth) {
  return std::make_shared<StreamRunner>(std::move(state), depth);
}

}  // namespace kvtier::gds
