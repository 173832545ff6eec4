// CUDA's words for g++: kernel sources include this (through device.h) and run on a CPU, in tests.
//
// Every CUDA thread is a fiber. Fibers change only where threads meet or wait (barriers, warp
// collectives, mbarriers), in a random order of a seed that is unfair on purpose: one warp runs
// far ahead of another, so that a barrier that is missing shows as wrong bytes for some seed. CTAs
// run in random order. Shared memory begins as garbage and has no byte more than was asked for.
// What CUDA leaves undefined when threads meet wrongly (some exited, some elsewhere) is an error.
// The CTAs of a launch run one after another on the caller's thread; launches may run at once on
// several threads.
//
// Compiled for tests only. Kernels are built into the simulator by sim_kernels.hpp's table.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

namespace kvtier::sim {

using Where = std::source_location;

/// Where the running CUDA thread is.
struct Place {
  dim3 thread;
  dim3 cta;
  dim3 block;
  dim3 grid;
  void* shared;
  std::size_t shared_bytes;
};
inline constinit thread_local Place place{};

/// Ends the launch with an error; its words say what, the CUDA thread and the line.
[[noreturn]] void fail(const char* words, Where where = Where::current());

/// Ends the launch where an access is not aligned to its size, or goes to memory that kernels have
/// no business with.
void check_access(const void* address, std::size_t nbytes, Where where = Where::current());

/// Whether kernels must not use that memory, though this process could. For who plays the driver.
using IsForbidden = bool (*)(const void* address, std::size_t nbytes);
void forbid(IsForbidden is_forbidden);

/// The CTA's static shared memory for a declaration, which `key` stands for; the same for all.
void* static_shared(const void* key, std::size_t nbytes, std::size_t alignment);

void sync_block(Where where);

enum class Collective : std::uint8_t { kSync, kShuffle, kVote };
constexpr unsigned kWarpSize = 32;

/// What lanes of one collective gave.
struct Gathered {
  std::uint64_t values[kWarpSize];
  unsigned lanes;  // which of the mask exist
};
/// Returns when every lane of `mask` has come to the same collective.
const Gathered& meet(Collective kind, unsigned mask, std::uint64_t value, Where where);

inline unsigned lane() {
  const dim3& thread = place.thread;
  return (thread.x + place.block.x * (thread.y + place.block.y * thread.z)) % kWarpSize;
}

template <typename Value>
std::uint64_t bits_of(Value value) {
  static_assert(sizeof(Value) <= 8 && std::is_trivially_copyable_v<Value>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

/// The value of lane `source`, garbage if it takes no part; a lane beyond the width gives its own.
template <typename Value>
Value shuffle(unsigned mask, Value value, int source, int width, Where where) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail("a shuffle's width", where);
  const Gathered& gathered = meet(Collective::kShuffle, mask, bits_of(value), where);
  const unsigned own = lane();
  const int first = static_cast<int>(own) & ~(width - 1);
  const unsigned from = source < 0 || source >= width ? own : static_cast<unsigned>(first + source);
  std::uint64_t bits = 0xA5A5A5A5A5A5A5A5u;
  if (gathered.lanes >> from & 1u) bits = gathered.values[from];
  Value result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

}  // namespace kvtier::sim

#define threadIdx (::kvtier::sim::place.thread)
#define blockIdx (::kvtier::sim::place.cta)
#define blockDim (::kvtier::sim::place.block)
#define gridDim (::kvtier::sim::place.grid)

inline void __syncthreads(kvtier::sim::Where where = kvtier::sim::Where::current()) {
  kvtier::sim::sync_block(where);
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       kvtier::sim::Where where = kvtier::sim::Where::current()) {
  kvtier::sim::meet(kvtier::sim::Collective::kSync, mask, 0, where);
}

template <typename Value>
Value __shfl_sync(unsigned mask, Value value, int source, int width = 32,
                  kvtier::sim::Where where = kvtier::sim::Where::current()) {
  return kvtier::sim::shuffle(mask, value, source & (width - 1), width, where);
}
template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, int bits, int width = 32,
                      kvtier::sim::Where where = kvtier::sim::Where::current()) {
  const int own = static_cast<int>(kvtier::sim::lane()) & (width - 1);
  return kvtier::sim::shuffle(mask, value, own ^ bits, width, where);
}
template <typename Value>
Value __shfl_up_sync(unsigned mask, Value value, unsigned delta, int width = 32,
                     kvtier::sim::Where where = kvtier::sim::Where::current()) {
  const int own = static_cast<int>(kvtier::sim::lane()) & (width - 1);
  return kvtier::sim::shuffle(mask, value, own - static_cast<int>(delta), width, where);
}
template <typename Value>
Value __shfl_down_sync(unsigned mask, Value value, unsigned delta, int width = 32,
                       kvtier::sim::Where where = kvtier::sim::Where::current()) {
  const int own = static_cast<int>(kvtier::sim::lane()) & (width - 1);
  return kvtier::sim::shuffle(mask, value, own + static_cast<int>(delta), width, where);
}

inline unsigned __ballot_sync(unsigned mask, bool predicate,
                              kvtier::sim::Where where = kvtier::sim::Where::current()) {
  using namespace kvtier::sim;
  const Gathered& gathered = meet(Collective::kVote, mask, predicate, where);
  unsigned votes = 0;
  for (unsigned i = 0; i < kWarpSize; ++i) {
    if (gathered.lanes >> i & 1u) votes |= static_cast<unsigned>(gathered.values[i]) << i;
  }
  return votes;
}
inline bool __any_sync(unsigned mask, bool predicate,
                       kvtier::sim::Where where = kvtier::sim::Where::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline bool __all_sync(unsigned mask, bool predicate,
                       kvtier::sim::Where where = kvtier::sim::Where::current()) {
  return __ballot_sync(mask, !predicate, where) == 0;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(std::uint64_t{a} * b >> 32);
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/// Sets the target to what `change` makes of it, and gives what it was.
namespace kvtier::sim {
template <typename Value, typename Change>
Value exchange_with(Value* target, Change change) {
  Value old;
  __atomic_load(target, &old, __ATOMIC_RELAXED);
  for (;;) {
    Value next = change(old);
    if (__atomic_compare_exchange(target, &old, &next, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
      return old;
    }
  }
}
}  // namespace kvtier::sim

// The value's type follows from the target's, as with CUDA's overloads.
template <typename Value>
Value atomicCAS(Value* target, std::type_identity_t<Value> expected,
                std::type_identity_t<Value> value) {
  return kvtier::sim::exchange_with(target,
                                    [&](Value old) { return old == expected ? value : old; });
}
template <typename Value>
Value atomicExch(Value* target, std::type_identity_t<Value> value) {
  return kvtier::sim::exchange_with(target, [&](Value) { return value; });
}
template <typename Value>
Value atomicAdd(Value* target, std::type_identity_t<Value> value) {
  return kvtier::sim::exchange_with(target,
                                    [&](Value old) { return static_cast<Value>(old + value); });
}
template <typename Value>
Value atomicMin(Value* target, std::type_identity_t<Value> value) {
  return kvtier::sim::exchange_with(target, [&](Value old) { return value < old ? value : old; });
}
template <typename Value>
Value atomicMax(Value* target, std::type_identity_t<Value> value) {
  return kvtier::sim::exchange_with(target, [&](Value old) { return old < value ? value : old; });
}
template <typename Value>
Value atomicOr(Value* target, std::type_identity_t<Value> value) {
  return kvtier::sim::exchange_with(target,
                                    [&](Value old) { return static_cast<Value>(old | value); });
}
template <typename Value>
Value atomicAnd(Value* target, std::type_identity_t<Value> value) {
  return kvtier::sim::exchange_with(target,
                                    [&](Value old) { return static_cast<Value>(old & value); });
}
