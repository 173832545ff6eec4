// Registered buffers, through which memory goes that cuFile does not register itself.
#pragma once
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../shim/cufile.hpp"
#include "gds_codes.hpp"

namespace kvtier::gds {

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

/// At most `count_max` buffers of `buffer_bytes` in host memory, made when needed. Any thread.
class StagingPool {
  using Buffer = std::unique_ptr<std::byte, Free>;

 public:
  static constexpr std::size_t kAlignBytes = 4096;  // cuFile bounces what is not at a page's start

  StagingPool(const cufile::Library& library, std::size_t count_max, std::size_t buffer_bytes)
      : library_(library), count_max_(count_max), buffer_bytes_(buffer_bytes) {
    free_.reserve(count_max_);  // so that giving a buffer back cannot fail
  }
  ~StagingPool() {  // nothing is lent any more
    for (const Buffer& buffer : free_) library_.buffer_deregister(buffer.get());
  }
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  /// See to it that there is a buffer at all. @return 0, or why there is none
  int prepare() {
    const std::lock_guard lock(mutex_);
    return count_ > 0 ? 0 : add();
  }

  /// A buffer, lent as long as this lives; waits for one while all there may be are lent.
  class Loan {
   public:
    explicit Loan(StagingPool& pool) : pool_(pool), buffer_(pool.take()) {}
    ~Loan() { pool_.give_back(std::move(buffer_)); }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    std::byte* get() const { return buffer_.get(); }

   private:
    StagingPool& pool_;
    Buffer buffer_;
  };

 private:
  /// Under the lock. @return 0, or why it failed
  int add() {
    Buffer buffer(static_cast<std::byte*>(std::aligned_alloc(kAlignBytes, buffer_bytes_)));
    if (!buffer) return ENOMEM;
    const cufile::Status status = library_.buffer_register(buffer.get(), buffer_bytes_, 0);
    if (status.code != 0) return code_of(status);
    free_.push_back(std::move(buffer));
    ++count_;
    return 0;
  }

  Buffer take() {
    std::unique_lock lock(mutex_);
    // `prepare` made one, so there is one to wait for if no more can be had.
    if (free_.empty() && count_ < count_max_) add();
    returned_.wait(lock, [this] { return !free_.empty(); });
    Buffer buffer = std::move(free_.back());
    free_.pop_back();
    return buffer;
  }

  void give_back(Buffer buffer) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(buffer));
    returned_.notify_one();
  }

  const cufile::Library& library_;
  const std::size_t count_max_;
  const std::size_t buffer_bytes_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<Buffer> free_;
  std::size_t count_ = 0;
};

}  // namespace kvtier::gds
