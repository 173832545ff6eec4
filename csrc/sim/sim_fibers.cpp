#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <numeric>
#include <system_error>

#include "sim_cta.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvtier::sim {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;  // virtual: a kernel touches some KiB
constexpr std::size_t kGuardBytes = 64 << 10;   // a page of any architecture

thread_local Cta* current_cta = nullptr;

/// Thrown through a CUDA thread, from where it failed to where it began.
struct ThreadFailure {
  std::string words;
};

class Stack {
 public:
  Stack() {
    memory_ = ::mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    ::mprotect(memory_, kGuardBytes, PROT_NONE);
  }
  Stack(Stack&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)) {}
  Stack& operator=(Stack&&) = delete;
  ~Stack() {
    if (memory_ != nullptr) ::munmap(memory_, kGuardBytes + kStackBytes);
  }
  std::byte* get() const { return static_cast<std::byte*>(memory_) + kGuardBytes; }

 private:
  void* memory_;
};

/// Stacks of this OS thread, kept from one launch to the next.
std::vector<Stack>& stacks() {
  static thread_local std::vector<Stack> kept;
  return kept;
}

std::vector<Fiber>& fibers() {
  static thread_local std::vector<Fiber> kept;
  return kept;
}

dim3 thread_at(std::size_t index, const dim3& block) {
  return {static_cast<unsigned>(index % block.x), static_cast<unsigned>(index / block.x % block.y),
          static_cast<unsigned>(index / block.x / block.y)};
}

// AddressSanitizer has to know of every change of stacks.
void before_switch([[maybe_unused]] void** save, [[maybe_unused]] const void* stack,
                   [[maybe_unused]] std::size_t nbytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(save, stack, nbytes);
#endif
}
void after_switch([[maybe_unused]] void* saved, [[maybe_unused]] const void** stack,
                  [[maybe_unused]] std::size_t* nbytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(saved, stack, nbytes);
#endif
}
/// A stack whose thread was given up keeps no poison of its frames.
void clean(const Stack& stack) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(stack.get(), kStackBytes);
#else
  (void)stack;
#endif
}

}  // namespace

std::string words_at(const dim3& thread, const Where& where, const std::string& words) {
  std::string file = where.file_name();
  file.erase(0, file.rfind('/') + 1);
  return "thread " + std::to_string(thread.x) + " of CTA " + std::to_string(place.cta.x) + ", " +
         file + ":" + std::to_string(where.line()) + ": " + words;
}

void fail(const char* words, Where where) {
  throw ThreadFailure{words_at(place.thread, where, words)};
}
void sync_block(Where where) { Cta::current()->sync_block(where); }
const Gathered& meet(Collective collective, unsigned mask, std::uint64_t value, Where where) {
  return Cta::current()->meet(collective, mask, value, where);
}
void* static_shared(const void* key, std::size_t nbytes, std::size_t alignment) {
  return Cta::current()->static_shared(key, nbytes, alignment);
}

Garbage::Garbage(std::size_t nbytes, std::size_t alignment, Random& random)
    : memory_(static_cast<std::byte*>(::operator new(nbytes, std::align_val_t{alignment})),
              Free{alignment}) {
  constexpr std::array kFills = {0xA5, 0xFF, 0x5A, 0x7F};  // 0xFF and 0x7F: NaNs of any width
  std::memset(memory_.get(), kFills[random.below(kFills.size())], nbytes);
}

Cta::Cta(const Launch& launch, std::uint64_t seed)
    : launch_(launch),
      random_(seed),
      thread_count_(std::size_t{launch.block.x} * launch.block.y * launch.block.z),
      shared_(launch.shared_bytes, 128, random_),
      bulk_({shared_.get(), launch.shared_bytes}, random_) {
  place.shared = shared_.get();
  place.shared_bytes = launch.shared_bytes;
  current_cta = this;
}

Cta::~Cta() {
  current_cta = nullptr;
  place.shared = nullptr;
}

Cta* Cta::current() { return current_cta; }

std::size_t Cta::warp_end(std::size_t warp) const {
  return std::min(thread_count_, (warp + 1) * kWarpSize);
}

void Cta::run() {
  try {
    if (launch_.kernel->traits.threads_meet) {
      run_fibers();
    } else {
      run_plainly();
    }
    bulk_.finish();
  } catch (const ThreadFailure& failure) {
    throw LaunchError(719, failure.words);
  }
}

void Cta::run_plainly() {
  // No order may matter, so one of two does for all.
  const bool is_backwards = random_.below(2) == 1;
  for (std::size_t i = 0; i < thread_count_; ++i) {
    place.thread = thread_at(is_backwards ? thread_count_ - 1 - i : i, launch_.block);
    launch_.kernel->body(launch_.arguments);
  }
}

// ------------------------------------------------------------------------- as a CUDA thread sees
// it

void Cta::suspend(State state, Where where) {
  if (fibers_ == nullptr) fail("threads meet, but the kernel's traits say they do not", where);
  Fiber* const own = running_;
  own->state = state;
  own->where = where;
  before_switch(state == State::kDone ? nullptr : &own->fake_stack, scheduler_stack_,
                scheduler_stack_bytes_);
  ::swapcontext(&own->context, &scheduler_);
  after_switch(own->fake_stack, nullptr, nullptr);
}

void Cta::sync_block(Where where) {
  ++barrier_count_;
  suspend(State::kAtBarrier, where);
}

const Gathered& Cta::meet(Collective collective, unsigned mask, std::uint64_t value, Where where) {
  if ((mask >> lane() & 1u) == 0) fail("a warp collective whose mask leaves out the caller", where);
  if (fibers_ == nullptr) fail("threads meet, but the kernel's traits say they do not", where);
  running_->collective = collective;
  running_->mask = mask;
  running_->value = value;
  suspend(State::kMeets, where);
  return running_->gathered;
}

void Cta::await_phase(const void* barrier, unsigned parity, Where where) {
  bulk_.steps();
  if (bulk_.is_phase_over(barrier, parity, where) && random_.below(2) == 0) return;
  if (fibers_ == nullptr) fail("threads wait, but the kernel's traits say they do not", where);
  running_->barrier = barrier;
  running_->parity = parity;
  suspend(State::kAwaitsPhase, where);
}

void* Cta::static_shared(const void* key, std::size_t nbytes, std::size_t alignment) {
  for (const Static& each : statics_) {
    if (each.key == key) return each.memory.get();
  }
  statics_.push_back({key, Garbage(nbytes, alignment, random_)});
  return statics_.back().memory.get();
}

void Cta::begin_fiber() {
  Cta& cta = *current_cta;
  after_switch(nullptr, &cta.scheduler_stack_, &cta.scheduler_stack_bytes_);
  try {
    cta.launch_.kernel->body(cta.launch_.arguments);
  } catch (const ThreadFailure& failure) {
    cta.failure_ = failure.words;
  }
  ++cta.done_count_;
  cta.suspend(State::kDone, Where::current());
}

// ------------------------------------------------------------------------------------ the
// scheduler

void Cta::run_fibers() {
  std::vector<Stack>& kept = stacks();
  while (kept.size() < thread_count_) kept.emplace_back();
  fibers_ = &fibers();
  fibers_->resize(thread_count_);
  for (std::size_t i = 0; i < thread_count_; ++i) {
    Fiber& fiber = (*fibers_)[i];
    fiber.thread = thread_at(i, launch_.block);
    fiber.state = State::kReady;
    fiber.fake_stack = nullptr;
    clean(kept[i]);
    ::getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = kept[i].get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    ::makecontext(&fiber.context, &Cta::begin_fiber, 0);
  }
  // A random warp runs ahead through its collectives until a barrier, its end or a coin's toss.
  // Taking turns would hide most of the barriers that are missing.
  const std::size_t warp_count = (thread_count_ + kWarpSize - 1) / kWarpSize;
  std::vector<std::size_t> runnable;
  while (done_count_ < thread_count_) {
    bulk_.steps();
    runnable.clear();
    for (std::size_t warp = 0; warp < warp_count; ++warp) {
      if (settle(warp)) runnable.push_back(warp);
    }
    if (!runnable.empty()) {
      run_warp(runnable[random_.below(runnable.size())]);
    } else if (barrier_count_ > 0 && barrier_count_ + done_count_ == thread_count_) {
      release_barrier();
    } else if (!bulk_.step()) {
      stuck();
    }
  }
}

void Cta::run_warp(std::size_t warp) {
  std::vector<std::size_t> ready;
  do {
    ready.clear();
    for (std::size_t i = warp_begin(warp); i < warp_end(warp); ++i) {
      if ((*fibers_)[i].state == State::kReady) ready.push_back(i);
    }
    random_.shuffle(ready);
    for (const std::size_t index : ready) resume(index);
  } while (random_.below(8) != 0 && settle(warp));
}

void Cta::resume(std::size_t index) {
  Fiber& fiber = (*fibers_)[index];
  running_ = &fiber;
  place.thread = fiber.thread;
  before_switch(&scheduler_fake_stack_, stacks()[index].get(), kStackBytes);
  ::swapcontext(&scheduler_, &fiber.context);
  after_switch(scheduler_fake_stack_, nullptr, nullptr);
  if (!failure_.empty()) throw LaunchError(719, failure_);
}

/// Lets those of a warp go on who have what they wait for; whether any may run.
bool Cta::settle(std::size_t warp) {
  bool is_runnable = false;
  for (std::size_t i = warp_begin(warp); i < warp_end(warp); ++i) {
    Fiber& fiber = (*fibers_)[i];
    if (fiber.state == State::kMeets) gather(warp, i);
    if (fiber.state == State::kAwaitsPhase &&
        bulk_.is_phase_over(fiber.barrier, fiber.parity, fiber.where)) {
      fiber.state = State::kReady;
    }
    is_runnable = is_runnable || fiber.state == State::kReady;
  }
  return is_runnable;
}

/// Completes the collective that a lane waits in, if all of its mask are there.
void Cta::gather(std::size_t warp, std::size_t index) {
  const Fiber& first = (*fibers_)[index];
  const std::size_t begin = warp_begin(warp);
  Gathered gathered{};
  for (std::size_t i = begin; i < warp_end(warp); ++i) {
    const Fiber& fiber = (*fibers_)[i];
    if ((first.mask >> (i - begin) & 1u) == 0) continue;
    if (fiber.state == State::kDone) blame(first, "a warp collective with a lane that has exited");
    if (fiber.state != State::kMeets) return;
    if (fiber.mask != first.mask || fiber.collective != first.collective ||
        fiber.where.line() != first.where.line()) {
      blame(first, "lanes meet in different warp collectives, or with different masks");
    }
    gathered.values[i - begin] = fiber.value;
    gathered.lanes |= 1u << (i - begin);
  }
  for (std::size_t i = begin; i < warp_end(warp); ++i) {
    if ((gathered.lanes >> (i - begin) & 1u) == 0) continue;
    (*fibers_)[i].gathered = gathered;
    (*fibers_)[i].state = State::kReady;
  }
}

void Cta::release_barrier() {
  const Fiber* first = nullptr;
  for (const Fiber& fiber : *fibers_) {
    if (fiber.state != State::kAtBarrier) continue;
    if (first == nullptr) first = &fiber;
    if (done_count_ > 0) blame(fiber, "__syncthreads after some threads have exited");
    if (fiber.where.line() != first->where.line()) {
      blame(fiber, "threads meet in different __syncthreads");
    }
  }
  for (Fiber& fiber : *fibers_) fiber.state = State::kReady;
  barrier_count_ = 0;
}

void Cta::stuck() const {
  for (const State state : {State::kMeets, State::kAwaitsPhase, State::kAtBarrier}) {
    for (const Fiber& fiber : *fibers_) {
      if (fiber.state != state) continue;
      blame(fiber, state == State::kMeets         ? "a warp collective not all lanes come to"
                   : state == State::kAwaitsPhase ? "an mbarrier whose phase never ends"
                                                  : "__syncthreads not all threads come to");
    }
  }
  throw LaunchError(719, "no thread can run");
}

void Cta::blame(const Fiber& fiber, const std::string& words) const {
  throw LaunchError(719, words_at(fiber.thread, fiber.where, words));
}

void run_launch(const Launch& launch) {
  if (current_cta != nullptr) throw LaunchError(719, "a launch within a kernel");
  Random random(launch.seed);
  std::vector<std::uint64_t> order(launch.cta_count);
  std::iota(order.begin(), order.end(), launch.first_cta);
  random.shuffle(order);
  place.block = launch.block;
  place.grid = launch.grid;
  for (const std::uint64_t index : order) {
    place.cta = {static_cast<unsigned>(index % launch.grid.x),
                 static_cast<unsigned>(index / launch.grid.x % launch.grid.y),
                 static_cast<unsigned>(index / launch.grid.x / launch.grid.y)};
    Cta(launch, random.next()).run();
  }
}

}  // namespace kvtier::sim
