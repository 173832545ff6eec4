// A CTA's mbarriers and the bulk copies it has under way. For sim_*.cpp only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "bulk_sim.h"
#include "sim_random.hpp"

namespace kvtier::sim {

/// Whatever is wrong ends the launch through fail() or LaunchError.
class BulkCopies {
 public:
  BulkCopies(std::span<std::byte> shared, Random& random);

  void init(std::uint64_t* barrier, unsigned count, Where where);
  void fence();
  void arrive_expect(std::uint64_t* barrier, unsigned nbytes, Where where);
  bool is_phase_over(const void* barrier, unsigned parity, Where where) const;

  void load(void* target, const void* source, unsigned nbytes, std::uint64_t* barrier, Where where);
  void store(std::uint64_t thread, void* target, const void* source, unsigned nbytes, Where where);
  void commit(std::uint64_t thread);
  void wait(std::uint64_t thread, unsigned groups, bool only_read);

  /// One random step of one copy; false if none is under way.
  bool step();
  /// Some steps, as the CTA's temper has it: from none until they are forced, to all at once.
  void steps();
  /// At the CTA's end: what may outlive it is finished, what may not is an error.
  void finish();

 private:
  struct Barrier {
    unsigned count;      // arrivals of a phase
    unsigned pending;    // still to come in this one
    std::int64_t bytes;  // still to come in this one
    unsigned phase;
    bool is_fenced;
  };
  struct Load {
    std::size_t offset;  // in shared memory
    const std::byte* source;
    std::size_t nbytes;
    std::uint64_t* barrier;
    Where where;
  };
  struct Store {
    std::uint64_t thread;
    std::uint64_t group;
    std::byte* target;
    std::size_t offset;  // in shared memory
    std::size_t nbytes;
    bool is_read;
    std::vector<std::byte> bytes;  // once read
    Where where;
  };

  Barrier& find(const void* barrier, Where where);
  const Barrier& find(const void* barrier, Where where) const;
  static void complete(Barrier& barrier);
  std::size_t offset_of(const void* shared, unsigned nbytes, Where where) const;
  void step_load(std::size_t index);
  void read(Store& store);
  static void write(const Store& store);

  std::span<std::byte> shared_;
  Random& random_;
  std::size_t steps_of_eight_;   // the CTA's temper
  std::vector<std::byte> seen_;  // shared memory as copies see it; empty before their first use
  std::map<const void*, Barrier> barriers_;
  std::map<std::uint64_t, std::uint64_t> groups_;  // closed ones, by thread
  std::vector<Load> loads_;
  std::vector<Store> stores_;
};

}  // namespace kvtier::sim
