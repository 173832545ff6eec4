#include "sim_bulk.hpp"

#include <algorithm>
#include <cstring>

#include "sim_cta.hpp"

namespace kvtier::sim {
namespace {

constexpr std::uint64_t kBarrierWord = 0x6B7674626172F1E5u;  // what an mbarrier's memory holds
constexpr unsigned kBytesMax = (1u << 20) - 1;  // an mbarrier counts in 20 bits and a sign
constexpr std::size_t kUnit = 16;

Cta& cta(Where where) {
  Cta* const current = Cta::current();
  if (current == nullptr) fail("a bulk copy outside of a CTA", where);
  return *current;
}

std::uint64_t own_thread() {
  return place.thread.x + std::uint64_t{place.block.x} *
                              (place.thread.y + std::uint64_t{place.block.y} * place.thread.z);
}

}  // namespace

BulkCopies::BulkCopies(std::span<std::byte> shared, Random& random)
    : shared_(shared), random_(random) {
  constexpr std::size_t kTempers[] = {0, 1, 4, 8};
  steps_of_eight_ = kTempers[random.below(4)];
}

void BulkCopies::init(std::uint64_t* barrier, unsigned count, Where where) {
  if (reinterpret_cast<std::uintptr_t>(barrier) % 8 != 0) fail("an mbarrier's alignment", where);
  if (count == 0) fail("an mbarrier for nobody", where);
  *barrier = kBarrierWord;
  barriers_[barrier] = {count, count, 0, 0, false};
}

void BulkCopies::fence() {
  seen_.assign(shared_.begin(), shared_.end());
  for (auto& [address, barrier] : barriers_) barrier.is_fenced = true;
}

BulkCopies::Barrier& BulkCopies::find(const void* barrier, Where where) {
  const auto found = barriers_.find(barrier);
  std::uint64_t word = 0;
  if (found != barriers_.end()) std::memcpy(&word, barrier, sizeof word);
  if (word != kBarrierWord) fail("no mbarrier is there, or no more", where);
  return found->second;
}

const BulkCopies::Barrier& BulkCopies::find(const void* barrier, Where where) const {
  return const_cast<BulkCopies*>(this)->find(barrier, where);
}

void BulkCopies::complete(Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
}

void BulkCopies::arrive_expect(std::uint64_t* address, unsigned nbytes, Where where) {
  Barrier& barrier = find(address, where);
  if (barrier.pending == 0) fail("more arrivals than the mbarrier's phase has", where);
  barrier.bytes += nbytes;
  if (barrier.bytes > kBytesMax) fail("more bytes than an mbarrier counts", where);
  --barrier.pending;
  complete(barrier);
}

bool BulkCopies::is_phase_over(const void* barrier, unsigned parity, Where where) const {
  return (find(barrier, where).phase & 1u) != (parity & 1u);
}

std::size_t BulkCopies::offset_of(const void* shared, unsigned nbytes, Where where) const {
  const auto* const bytes = static_cast<const std::byte*>(shared);
  const bool is_inside =
      bytes >= shared_.data() && nbytes <= shared_.size() &&
      bytes - shared_.data() <= static_cast<std::ptrdiff_t>(shared_.size() - nbytes);
  if (!is_inside) fail("a bulk copy beyond dynamic shared memory", where);
  return static_cast<std::size_t>(bytes - shared_.data());
}

void BulkCopies::load(void* target, const void* source, unsigned nbytes, std::uint64_t* barrier,
                      Where where) {
  const std::size_t offset = offset_of(target, nbytes, where);
  if (nbytes == 0 || nbytes % kUnit != 0 || reinterpret_cast<std::uintptr_t>(source) % kUnit != 0 ||
      reinterpret_cast<std::uintptr_t>(target) % kUnit != 0) {
    fail("a bulk load of no multiple of 16 bytes", where);
  }
  check_access(source, kUnit, where);
  if (!find(barrier, where).is_fenced) fail("an mbarrier that no fence has shown to copies", where);
  if (seen_.empty()) seen_.assign(shared_.size(), std::byte{0xC3});
  loads_.push_back({offset, static_cast<const std::byte*>(source), nbytes, barrier, where});
  steps();
}

void BulkCopies::store(std::uint64_t thread, void* target, const void* source, unsigned nbytes,
                       Where where) {
  const std::size_t offset = offset_of(source, nbytes, where);
  if (nbytes == 0 || nbytes % kUnit != 0 || reinterpret_cast<std::uintptr_t>(source) % kUnit != 0 ||
      reinterpret_cast<std::uintptr_t>(target) % kUnit != 0) {
    fail("a bulk store of no multiple of 16 bytes", where);
  }
  check_access(target, kUnit, where);
  if (seen_.empty()) seen_.assign(shared_.size(), std::byte{0xC3});
  stores_.push_back(
      {thread, groups_[thread], static_cast<std::byte*>(target), offset, nbytes, false, {}, where});
  steps();
}

void BulkCopies::commit(std::uint64_t thread) { ++groups_[thread]; }

void BulkCopies::wait(std::uint64_t thread, unsigned groups, bool only_read) {
  const std::uint64_t closed = groups_[thread];
  const std::uint64_t end = closed > groups ? closed - groups : 0;
  const auto covered = [&](const Store& store) {
    return store.thread == thread && store.group < end;
  };
  for (Store& store : stores_) {
    if (!covered(store)) continue;
    if (!store.is_read) read(store);
    if (!only_read) write(store);
  }
  if (!only_read) std::erase_if(stores_, covered);
  steps();
}

void BulkCopies::step_load(std::size_t index) {
  Load& load = loads_[index];
  const std::size_t units = load.nbytes / kUnit;
  const std::size_t piece = kUnit * (random_.below(2) == 0 ? units : 1 + random_.below(units));
  std::memcpy(shared_.data() + load.offset, load.source, piece);
  std::memcpy(seen_.data() + load.offset, load.source, piece);
  Barrier& barrier = find(load.barrier, load.where);
  barrier.bytes -= static_cast<std::int64_t>(piece);
  complete(barrier);
  load.offset += piece;
  load.source += piece;
  load.nbytes -= piece;
  if (load.nbytes == 0) loads_.erase(loads_.begin() + static_cast<std::ptrdiff_t>(index));
}

void BulkCopies::read(Store& store) {
  const auto* const begin = seen_.data() + store.offset;
  store.bytes.assign(begin, begin + store.nbytes);
  store.is_read = true;
}

void BulkCopies::write(const Store& store) {
  std::memcpy(store.target, store.bytes.data(), store.nbytes);
}

bool BulkCopies::step() {
  const std::size_t count = loads_.size() + stores_.size();
  if (count == 0) return false;
  const std::size_t chosen = random_.below(count);
  if (chosen < loads_.size()) {
    step_load(chosen);
    return true;
  }
  const std::size_t index = chosen - loads_.size();
  if (!stores_[index].is_read) {
    read(stores_[index]);
  } else {
    write(stores_[index]);
    stores_.erase(stores_.begin() + static_cast<std::ptrdiff_t>(index));
  }
  return true;
}

void BulkCopies::steps() {
  if (steps_of_eight_ == 8) {
    while (step()) {
    }
    return;
  }
  while (random_.below(8) < steps_of_eight_ && step()) {
  }
}

void BulkCopies::finish() {
  if (!loads_.empty()) fail("the CTA ended under a bulk load", loads_[0].where);
  for (const Store& store : stores_) {
    if (!store.is_read) fail("the CTA ended while a bulk store read its memory", store.where);
    write(store);
  }
  stores_.clear();
}

void barrier_init(std::uint64_t* barrier, unsigned count, Where where) {
  cta(where).bulk().init(barrier, count, where);
}
void fence_async() { cta(Where::current()).bulk().fence(); }
void barrier_arrive_expect(std::uint64_t* barrier, unsigned nbytes, Where where) {
  cta(where).bulk().arrive_expect(barrier, nbytes, where);
}
void barrier_wait(std::uint64_t* barrier, unsigned parity, Where where) {
  cta(where).await_phase(barrier, parity, where);
}
void bulk_load(void* shared_target, const void* source, unsigned nbytes, std::uint64_t* barrier,
               Where where) {
  cta(where).bulk().load(shared_target, source, nbytes, barrier, where);
}
void bulk_store(void* target, const void* shared_source, unsigned nbytes, Where where) {
  cta(where).bulk().store(own_thread(), target, shared_source, nbytes, where);
}
void bulk_commit() { cta(Where::current()).bulk().commit(own_thread()); }
void bulk_wait_read(unsigned groups) {
  cta(Where::current()).bulk().wait(own_thread(), groups, true);
}
void bulk_wait(unsigned groups) { cta(Where::current()).bulk().wait(own_thread(), groups, false); }

}  // namespace kvtier::sim
