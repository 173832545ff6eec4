// Allocation against a plain list of used runs, and what happens to the memory at the end.
#include "kvtier/slab.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

using kvtier::Mapping;
using kvtier::Slab;

constexpr std::uint64_t kPage = Slab::kAlignBytes;

void check(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

template <typename F>
void check_refused(F&& call, const char* what) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return;
  }
  check(false, what);
}

void the_smallest_run_that_is_long_enough_is_taken() {
  Slab slab(16 * kPage, false);
  const auto a = slab.allocate(4 * kPage);
  const auto b = slab.allocate(1);
  const auto c = slab.allocate(2 * kPage);
  const auto d = slab.allocate(1);
  check(a == 0 && b == 4 * kPage && c == 5 * kPage && d == 7 * kPage, "runs follow each other");
  slab.free(*a);
  slab.free(*c);
  check(slab.allocate(2 * kPage - 1) == c, "a run of 2 pages is preferred to one of 4 or 8");
  check(slab.allocate(3 * kPage) == a, "then the one of 4");
  check(slab.largest_free_bytes() == 8 * kPage, "the longest run stayed whole");
}

void freed_neighbours_join() {
  Slab slab(3 * kPage, false);
  for (const auto& order : {std::vector{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}}) {
    for (int i = 0; i < 3; ++i) check(slab.allocate(kPage).has_value(), "room for three pages");
    check(!slab.allocate(1), "no room for a fourth");
    for (const int i : order) slab.free(static_cast<std::uint64_t>(i) * kPage);
    check(slab.used_bytes() == 0 && slab.largest_free_bytes() == 3 * kPage, "one run again");
  }
}

void mistakes_are_refused_and_change_nothing() {
  Slab slab(2 * kPage, false);
  const auto offset = slab.allocate(kPage);
  check_refused([&] { slab.free(kPage); }, "freeing what is free");
  check_refused([&] { slab.free(*offset + 1); }, "freeing the middle of a run");
  check_refused([&] { slab.allocate(0); }, "0 bytes");
  check_refused([&] { slab.hold(kPage, kPage + 1); }, "a look past the end");
  check_refused([&] { slab.hold(~std::uint64_t{0}, 2); }, "a look past the end by overflow");
  check_refused([] { Slab(0, false); }, "an empty slab");
  check(!slab.allocate(~std::uint64_t{0}), "nothing of that size");
  check(slab.used_bytes() == kPage, "still one page used");
}

void memory_outlives_close_while_it_is_held() {
  Slab slab(kPage, true);
  const auto held = slab.hold(0, kPage);
  slab.close();
  slab.close();
  held->address()[kPage - 1] = std::byte{7};
  check(held->address()[kPage - 1] == std::byte{7}, "still mapped");
  check(held.use_count() == 1, "nobody else holds it");
  check(slab.address() == 0, "no address");
  check_refused([&] { slab.allocate(1); }, "allocation after close");
  check_refused([&] { slab.hold(0, 1); }, "a look after close");
}

void prefaulting_changes_no_byte() {
  Slab slab(std::uint64_t{64} << 20, true);
  const auto held = slab.hold(0, slab.capacity_bytes());
  for (std::uint64_t at = 0; at < slab.capacity_bytes(); at += kPage) {
    held->address()[at] = std::byte{42};
  }
  while (slab.prefaulted_bytes() < slab.capacity_bytes()) std::this_thread::yield();
  for (std::uint64_t at = 0; at < slab.capacity_bytes(); at += kPage) {
    check(held->address()[at] == std::byte{42}, "the byte written while it ran");
  }
  check(reinterpret_cast<std::uintptr_t>(held->address()) % (2 << 20) == 0, "2 MiB-aligned");
}

void random_use_never_overlaps_and_loses_nothing() {
  constexpr std::uint64_t kPages = 256;
  constexpr unsigned kSeed = 20240607;
  std::mt19937 random(kSeed);
  Slab slab(kPages * kPage, false);
  std::map<std::uint64_t, std::uint64_t> used;  // offset -> bytes
  std::uint64_t used_bytes = 0;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const std::uint64_t asked = random() % (24 * kPage) + 1;
      const std::uint64_t nbytes = (asked + kPage - 1) / kPage * kPage;
      const std::uint64_t longest = slab.largest_free_bytes();
      const auto offset = slab.allocate(asked);
      check(offset.has_value() == (nbytes <= longest), "given exactly when a run is long enough");
      if (!offset) continue;
      const auto next = used.lower_bound(*offset);
      check(next == used.end() || *offset + nbytes <= next->first, "ends before the next");
      check(next == used.begin() || std::prev(next)->first + std::prev(next)->second <= *offset,
            "starts after the previous");
      used.emplace(*offset, nbytes);
      used_bytes += nbytes;
    } else if (!used.empty()) {
      auto victim = used.begin();
      std::advance(victim, static_cast<std::ptrdiff_t>(random() % used.size()));
      slab.free(victim->first);
      used_bytes -= victim->second;
      used.erase(victim);
    }
    check(slab.used_bytes() == used_bytes, "exact accounting");
  }
  for (const auto& [offset, nbytes] : used) slab.free(offset);
  check(slab.largest_free_bytes() == kPages * kPage, "one run at the end");
}

void many_threads_share_it() {
  Slab slab(64 * kPage, false);
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&slab] {
        for (int i = 0; i < 2000; ++i) {
          if (const auto offset = slab.allocate(3 * kPage)) slab.free(*offset);
        }
      });
    }
  }
  check(slab.used_bytes() == 0 && slab.largest_free_bytes() == 64 * kPage, "all came back");
}

void memory_of_a_file_is_shared_and_writable_where_it_was_asked_for() {
  const int fd = memfd_create("slab_test", MFD_CLOEXEC);
  check(fd >= 0 && ftruncate(fd, 3 * kPage) == 0, "a file of three pages");
  Slab slab(std::make_shared<const Mapping>(fd, 3 * kPage, true), true);
  const auto looked = std::make_shared<const Mapping>(fd, 3 * kPage, false);
  Slab look(looked, true);
  close(fd);
  const auto offset = slab.allocate(2 * kPage);
  const auto held = slab.hold(*offset, kPage);
  held->address()[*offset] = std::byte{9};
  check(looked->address()[*offset] == std::byte{9}, "the same memory");
  check(held->is_writable() && !looked->is_writable(), "as asked");
  check(reinterpret_cast<std::uintptr_t>(looked->address()) % (2 << 20) == 0, "aligned");
  while (look.prefaulted_bytes() < 3 * kPage || slab.prefaulted_bytes() < 3 * kPage) {
    std::this_thread::yield();
  }
  check(looked->address()[*offset] == std::byte{9}, "prefaulting changes nothing");
  check(slab.largest_free_bytes() == kPage, "allocated as any other");
}

}  // namespace

int main() {
  the_smallest_run_that_is_long_enough_is_taken();
  freed_neighbours_join();
  mistakes_are_refused_and_change_nothing();
  memory_outlives_close_while_it_is_held();
  prefaulting_changes_no_byte();
  random_use_never_overlaps_and_loses_nothing();
  many_threads_share_it();
  memory_of_a_file_is_shared_and_writable_where_it_was_asked_for();
}
