// Bulk copies between global and shared memory, and the mbarriers that tell of their end: sm_90 on.
//
// The copies run in the asynchronous proxy: they see what threads wrote to shared memory only after
// fence_async(), and their own bytes are seen by who has waited for the mbarrier.
#pragma once

#include "device.h"

#if !defined(__CUDACC__)
#include "../sim/bulk_sim.h"
#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace kvtier::device {

using Barrier = std::uint64_t;  // in shared memory

#if defined(__CUDACC__)

// A CTA's own memory; compilers before CUDA 12.8 only know the name of a cluster's, in which it is,
// too. Where newer ones cannot see that it is the CTA's own, they add a slow way for the others'.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
#define KVTIER_BULK_TARGET "shared::cta"
#else
#define KVTIER_BULK_TARGET "shared::cluster"
#endif

KVTIER_DEVICE std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

KVTIER_DEVICE std::uint32_t dynamic_shared_bytes() {
  std::uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

/// Ready for `count` arrivals; known to copies after fence_async().
KVTIER_DEVICE void barrier_init(Barrier* barrier, std::uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}

/// This thread's writes to shared memory, and its new mbarriers, are known to copies from here on.
KVTIER_DEVICE void fence_async() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// One arrival, and the phase ends only after so many bytes more.
KVTIER_DEVICE void barrier_arrive_expect(Barrier* barrier, std::uint32_t nbytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(nbytes)
      : "memory");
}

/// Returns when the phase of that parity is over; the first is 0.
KVTIER_DEVICE void barrier_wait(Barrier* barrier, std::uint32_t parity) {
  std::uint32_t is_over;
  do {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n"
        "}"
        : "=r"(is_over)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (is_over == 0);
}

/// Begin to load; the bytes arrive at the mbarrier. Addresses and size are multiples of 16.
KVTIER_DEVICE void bulk_load(void* shared_target, std::uint64_t source, std::uint32_t nbytes,
                             Barrier* barrier) {
  asm volatile("cp.async.bulk." KVTIER_BULK_TARGET
               ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared_target)),
               "l"(source), "r"(nbytes), "r"(shared_address(barrier))
               : "memory");
}

/// Begin to store, in this thread's open group. Addresses and size are multiples of 16.
KVTIER_DEVICE void bulk_store(std::uint64_t target, const void* shared_source,
                              std::uint32_t nbytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(shared_address(shared_source)), "r"(nbytes)
               : "memory");
}

/// Close this thread's group of stores.
KVTIER_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Returns when all but this thread's last kGroups groups have read shared memory.
template <int kGroups>
KVTIER_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

#else

KVTIER_DEVICE std::uint32_t dynamic_shared_bytes() {
  return static_cast<std::uint32_t>(sim::place.shared_bytes);
}
KVTIER_DEVICE void barrier_init(Barrier* barrier, std::uint32_t count,
                                sim::Where where = sim::Where::current()) {
  sim::barrier_init(barrier, count, where);
}
KVTIER_DEVICE void fence_async() { sim::fence_async(); }
KVTIER_DEVICE void barrier_arrive_expect(Barrier* barrier, std::uint32_t nbytes,
                                         sim::Where where = sim::Where::current()) {
  sim::barrier_arrive_expect(barrier, nbytes, where);
}
KVTIER_DEVICE void barrier_wait(Barrier* barrier, std::uint32_t parity,
                                sim::Where where = sim::Where::current()) {
  sim::barrier_wait(barrier, parity, where);
}
KVTIER_DEVICE void bulk_load(void* shared_target, std::uint64_t source, std::uint32_t nbytes,
                             Barrier* barrier, sim::Where where = sim::Where::current()) {
  sim::bulk_load(shared_target, reinterpret_cast<const void*>(source), nbytes, barrier, where);
}
KVTIER_DEVICE void bulk_store(std::uint64_t target, const void* shared_source, std::uint32_t nbytes,
                              sim::Where where = sim::Where::current()) {
  sim::bulk_store(reinterpret_cast<void*>(target), shared_source, nbytes, where);
}
KVTIER_DEVICE void bulk_commit() { sim::bulk_commit(); }
template <int kGroups>
KVTIER_DEVICE void bulk_wait_read() {
  sim::bulk_wait_read(kGroups);
}

#endif

}  // namespace kvtier::device

#endif
