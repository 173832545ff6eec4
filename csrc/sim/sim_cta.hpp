// One CTA in the simulator: its fibers, its memory, its bulk copies. For sim_*.cpp only.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "sim_bulk.hpp"
#include "sim_kernels.hpp"
#include "sim_random.hpp"

namespace kvtier::sim {

enum class State : std::uint8_t { kReady, kMeets, kAtBarrier, kAwaitsPhase, kDone };

/// A CUDA thread's own stack, and what it waits for.
struct Fiber {
  ucontext_t context;
  dim3 thread;
  State state;
  Where where;            // it waits
  Collective collective;  // kMeets
  unsigned mask;
  std::uint64_t value;
  Gathered gathered;
  const void* barrier;  // kAwaitsPhase
  unsigned parity;
  void* fake_stack;  // AddressSanitizer's
};

/// Memory of exactly so many bytes, all garbage; AddressSanitizer guards its ends.
class Garbage {
 public:
  Garbage(std::size_t nbytes, std::size_t alignment, Random& random);
  std::byte* get() const { return memory_.get(); }

 private:
  struct Free {
    std::size_t alignment;
    void operator()(std::byte* memory) const {
      ::operator delete(memory, std::align_val_t{alignment});
    }
  };
  std::unique_ptr<std::byte, Free> memory_;
};

/// Runs the threads of one CTA; the caller sets `place` to it first.
class Cta {
 public:
  Cta(const Launch& launch, std::uint64_t seed);
  Cta(const Cta&) = delete;
  Cta& operator=(const Cta&) = delete;
  ~Cta();

  /// @throws LaunchError
  void run();

  /// The one that runs on this OS thread; null outside launches.
  static Cta* current();

  // For the running CUDA thread.
  void sync_block(Where where);
  const Gathered& meet(Collective collective, unsigned mask, std::uint64_t value, Where where);
  void await_phase(const void* barrier, unsigned parity, Where where);
  void* static_shared(const void* key, std::size_t nbytes, std::size_t alignment);
  BulkCopies& bulk() { return bulk_; }
  Random& random() { return random_; }

 private:
  struct Static {
    const void* key;
    Garbage memory;
  };

  static void begin_fiber();
  void run_fibers();
  void run_plainly();
  void suspend(State state, Where where);
  void resume(std::size_t index);
  bool settle(std::size_t warp);
  void gather(std::size_t warp, std::size_t index);
  void run_warp(std::size_t warp);
  void release_barrier();
  [[noreturn]] void stuck() const;
  [[noreturn]] void blame(const Fiber& fiber, const std::string& words) const;
  std::size_t warp_begin(std::size_t warp) const { return warp * kWarpSize; }
  std::size_t warp_end(std::size_t warp) const;

  const Launch& launch_;
  Random random_;
  std::size_t thread_count_;
  Garbage shared_;
  std::vector<Static> statics_;
  BulkCopies bulk_;
  std::vector<Fiber>* fibers_ = nullptr;  // null when threads run plainly
  Fiber* running_ = nullptr;
  std::size_t done_count_ = 0;
  std::size_t barrier_count_ = 0;
  std::string failure_;
  ucontext_t scheduler_;
  const void* scheduler_stack_ = nullptr;  // AddressSanitizer's view of it
  std::size_t scheduler_stack_bytes_ = 0;
  void* scheduler_fake_stack_ = nullptr;
};

/// "thread 3 of CTA 0, copy.cu:12: words"
std::string words_at(const dim3& thread, const Where& where, const std::string& words);

}  // namespace kvtier::sim
