// mbarriers and bulk copies for kernel sources under g++: what async.h stands on in the simulator.
//
// Copies are really asynchronous: each runs, piece by piece, at some random later time, no later
// than the wait that covers it. They see shared memory as the last fence left it, not what threads
// have written since. So a wait or a fence that is missing shows as wrong bytes, and what would
// outlive the CTA is an error.
#pragma once

#include "cuda_sim.h"

namespace kvtier::sim {

void barrier_init(std::uint64_t* barrier, unsigned count, Where where);
/// Makes the running thread's writes to shared memory, and its new mbarriers, known to copies.
void fence_async();
void barrier_arrive_expect(std::uint64_t* barrier, unsigned nbytes, Where where);
/// Returns when the phase of that parity is over.
void barrier_wait(std::uint64_t* barrier, unsigned parity, Where where);

void bulk_load(void* shared_target, const void* source, unsigned nbytes, std::uint64_t* barrier,
               Where where);
void bulk_store(void* target, const void* shared_source, unsigned nbytes, Where where);
/// Closes the running thread's group of stores.
void bulk_commit();
/// Returns when at most so many of its groups still read shared memory.
void bulk_wait_read(unsigned groups);
/// Returns when at most so many of its groups are still under way.
void bulk_wait(unsigned groups);

}  // namespace kvtier::sim
