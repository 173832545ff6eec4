#include "kvtier/chunk_index.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace kvtier {
namespace {

// Chunks hashed ahead of the probes: enough to hide the probes' cache misses behind each other.
constexpr std::size_t kBatchMax = 16;

constexpr std::size_t kSlotsMin = 16;

std::uint32_t hash_of(const ChunkKey& key) {
  std::uint32_t hash;
  std::memcpy(&hash, key.data(), sizeof hash);  // SHA-256 is uniform as it is
  return hash;
}

}  // namespace

ChunkIndex::ChunkIndex(int tier_count) : tier_count_(tier_count) {
  if (tier_count < 1 || tier_count > kTierCountMax) {
    throw std::invalid_argument(std::to_string(tier_count) + " tiers, must be 1 to " +
                                std::to_string(kTierCountMax));
  }
}

std::size_t ChunkIndex::memory_bytes() const {
  return sizeof(*this) + entries_.memory_bytes() + slots_.capacity() * sizeof(Slot);
}

std::vector<std::uint32_t> ChunkIndex::lookup(const ChunkKey& root, std::size_t token_count,
                                              const ReadTokens& read, std::size_t chunk_tokens,
                                              std::size_t page_tokens) const {
  if (chunk_tokens == 0 || page_tokens == 0) {
    throw std::invalid_argument("chunk_tokens is " + std::to_string(chunk_tokens) +
                                ", page_tokens is " + std::to_string(page_tokens) +
                                ", both must be at least 1");
  }
  std::vector<std::uint32_t> run;
  const std::size_t whole_count = token_count / chunk_tokens;
  ChunkKey key = root;
  std::array<ChunkKey, kBatchMax> keys;
  // Batches double, so that an early miss has hashed little and a long run waits for memory rarely.
  for (std::size_t batch = 1; run.size() < whole_count; batch = std::min(2 * batch, kBatchMax)) {
    const std::size_t first = run.size();
    const std::size_t count = std::min(batch, whole_count - first);
    for (std::size_t i = 0; i < count; ++i) {
      keys[i] =
          chain_key(i == 0 ? key : keys[i - 1], read((first + i) * chunk_tokens, chunk_tokens));
      prefetch_slot(keys[i]);
    }
    for (std::size_t i = 0; i < count; ++i) prefetch_entry(keys[i]);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t chunk = find_held(keys[i]);
      if (chunk == kNone) break;
      run.push_back(chunk);
      key = keys[i];
    }
    if (run.size() < first + count) break;
  }
  const std::size_t first = run.size() * chunk_tokens;
  const std::uint32_t partial = find_longest_partial(
      key, run.empty() ? kNone : run.back(), first, std::min(token_count - first, chunk_tokens - 1),
      read, chunk_tokens, page_tokens);
  if (partial != kNone) run.push_back(partial);
  return run;
}

std::uint32_t ChunkIndex::find_longest_partial(const ChunkKey& parent_key, std::uint32_t parent,
                                               std::size_t first, std::size_t count,
                                               const ReadTokens& read, std::size_t chunk_tokens,
                                               std::size_t page_tokens) const {
  const std::size_t page_count = count / page_tokens;
  if (page_count == 0) return kNone;
  const auto width_max = static_cast<std::ptrdiff_t>(
      std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(chunk_tokens - 1)), 32));
  const auto some_short = [&](const WidthCounts& counts) {
    return std::any_of(counts.begin(), counts.begin() + width_max + 1,
                       [](std::uint32_t n) { return n != 0; });
  };
  const bool worth_hashing =
      some_short(orphans_) ||
      (parent == kNone ? some_short(roots_) : entries_[parent].partial_children != 0);
  if (!worth_hashing) return kNone;

  const auto tokens = read(first, page_count * page_tokens);
  Sha256 hash;
  hash.update(parent_key);
  std::uint32_t longest = kNone;
  for (std::size_t page = 0; page < page_count; ++page) {
    update_with_tokens(hash, tokens.subspan(page * page_tokens, page_tokens));
    const std::uint32_t chunk = find_held(Sha256(hash).finish());
    if (chunk != kNone) longest = chunk;
  }
  return longest;
}

std::vector<std::uint32_t> ChunkIndex::find(std::span<const ChunkKey> keys) const {
  std::vector<std::uint32_t> chunks;
  chunks.reserve(keys.size());
  while (!keys.empty()) {
    const auto batch = keys.first(std::min(keys.size(), kBatchMax));
    for (const ChunkKey& key : batch) prefetch_slot(key);
    for (const ChunkKey& key : batch) prefetch_entry(key);
    for (const ChunkKey& key : batch) chunks.push_back(find(key));
    keys = keys.subspan(batch.size());
  }
  return chunks;
}

std::vector<std::uint32_t> ChunkIndex::add(std::uint32_t parent, std::span<const ChunkKey> keys,
                                           std::span<const std::uint32_t> tokens,
                                           std::span<const std::uint64_t> nbytes) {
  check_new(keys, tokens, nbytes);
  if (parent != kNone) check_known(parent);
  std::vector<std::uint32_t> chunks = find(keys);
  reserve_for(chunks);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    chunks[i] = insert(keys[i], tokens[i], nbytes[i]);
    attach(chunks[i], parent);
    parent = chunks[i];
  }
  return chunks;
}

std::vector<std::uint32_t> ChunkIndex::add_linked(std::span<const ChunkKey> keys,
                                                  std::span<const ChunkKey> parent_keys,
                                                  std::span<const std::uint32_t> tokens,
                                                  std::span<const std::uint64_t> nbytes) {
  check_new(keys, tokens, nbytes);
  if (parent_keys.size() != keys.size()) {
    throw std::invalid_argument(std::to_string(parent_keys.size()) + " parent keys for " +
                                std::to_string(keys.size()) + " keys");
  }
  std::vector<std::uint32_t> chunks = find(keys);
  reserve_for(chunks);
  for (std::size_t i = 0; i < keys.size(); ++i) chunks[i] = insert(keys[i], tokens[i], nbytes[i]);
  // Only now, since a parent may come after its children.
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (parent_keys[i] == ChunkKey{}) {
      attach(chunks[i], kNone);
    } else if (const std::uint32_t parent = find(parent_keys[i]); parent != kNone) {
      attach(chunks[i], parent);
    }
  }
  return chunks;
}

void ChunkIndex::publish(std::span<const std::uint32_t> chunks, int tier) {
  check_tier(tier);
  check_known(chunks);
  const auto bit = static_cast<std::uint8_t>(1U << tier);
  for (const std::uint32_t chunk : chunks) entries_[chunk].tiers |= bit;
}

std::vector<std::uint32_t> ChunkIndex::withdraw(std::span<const std::uint32_t> chunks, int tier) {
  check_tier(tier);
  check_known(chunks);
  std::vector<std::uint32_t> unheld;
  unheld.reserve(chunks.size());
  const auto others = static_cast<std::uint8_t>(~(1U << tier));
  for (const std::uint32_t chunk : chunks) {
    Entry& entry = entries_[chunk];
    if (!entry.known || entry.seen) continue;  // `chunks` has it twice
    entry.tiers &= others;
    if (entry.tiers != 0) continue;
    unheld.push_back(chunk);
    if (entry.leases == 0) {
      let_go(chunk);
    } else {
      entry.seen = true;
    }
  }
  for (const std::uint32_t chunk : unheld) entries_[chunk].seen = false;
  return unheld;
}

void ChunkIndex::lease(std::span<const std::uint32_t> chunks) {
  check_known(chunks);
  for (const std::uint32_t chunk : chunks) {
    if (std::numeric_limits<std::uint32_t>::max() - entries_[chunk].leases < chunks.size()) {
      throw std::invalid_argument("chunk " + std::to_string(chunk) + " has " +
                                  std::to_string(entries_[chunk].leases) + " leases, no more fit");
    }
  }
  for (const std::uint32_t chunk : chunks) ++entries_[chunk].leases;
}

void ChunkIndex::release(std::span<const std::uint32_t> chunks) {
  check_known(chunks);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Entry& entry = entries_[chunks[i]];
    if (entry.leases == 0) {
      // Counted down rather than checked ahead: only so does a chunk given twice count twice.
      for (const std::uint32_t chunk : chunks.first(i)) ++entries_[chunk].leases;
      throw std::invalid_argument("chunk " + std::to_string(chunks[i]) +
                                  " is released more often than it is leased");
    }
    --entry.leases;
  }
  for (const std::uint32_t chunk : chunks) {
    const Entry& entry = entries_[chunk];
    if (entry.known && entry.leases == 0 && entry.tiers == 0) let_go(chunk);
  }
}

std::vector<std::uint32_t> ChunkIndex::suffix(std::uint32_t chunk) const {
  std::vector<std::uint32_t> descendants = children(chunk);
  for (std::size_t i = 0; i < descendants.size(); ++i) {
    for (std::uint32_t child = entries_[descendants[i]].first_child; child != kNone;
         child = entries_[child].next_sibling) {
      descendants.push_back(child);
    }
  }
  return descendants;
}

std::vector<std::uint32_t> ChunkIndex::children(std::uint32_t chunk) const {
  check_known(chunk);
  std::vector<std::uint32_t> result;
  for (std::uint32_t child = entries_[chunk].first_child; child != kNone;
       child = entries_[child].next_sibling) {
    result.push_back(child);
  }
  return result;
}

std::uint32_t ChunkIndex::parent(std::uint32_t chunk) const {
  check_known(chunk);
  return entries_[chunk].parent;
}

std::vector<std::uint32_t> ChunkIndex::held(int tier) const {
  check_tier(tier);
  std::vector<std::uint32_t> chunks;
  for (std::uint32_t chunk = 0; chunk < number_count_; ++chunk) {
    if ((entries_[chunk].tiers >> tier & 1) != 0) chunks.push_back(chunk);
  }
  return chunks;
}

template <typename Value>
std::vector<Value> ChunkIndex::read_all(std::span<const std::uint32_t> chunks,
                                        Value Entry::* field) const {
  check_known(chunks);
  std::vector<Value> values;
  values.reserve(chunks.size());
  for (const std::uint32_t chunk : chunks) values.push_back(entries_[chunk].*field);
  return values;
}

std::vector<std::uint8_t> ChunkIndex::tiers(std::span<const std::uint32_t> chunks) const {
  return read_all(chunks, &Entry::tiers);
}

std::vector<std::uint32_t> ChunkIndex::tokens(std::span<const std::uint32_t> chunks) const {
  return read_all(chunks, &Entry::tokens);
}

std::vector<std::uint64_t> ChunkIndex::nbytes(std::span<const std::uint32_t> chunks) const {
  return read_all(chunks, &Entry::nbytes);
}

std::vector<std::uint32_t> ChunkIndex::leases(std::span<const std::uint32_t> chunks) const {
  return read_all(chunks, &Entry::leases);
}

std::vector<ChunkKey> ChunkIndex::keys(std::span<const std::uint32_t> chunks) const {
  return read_all(chunks, &Entry::key);
}

void ChunkIndex::check_tier(int tier) const {
  if (tier < 0 || tier >= tier_count_) {
    throw std::invalid_argument("tier " + std::to_string(tier) + ", must be 0 to " +
                                std::to_string(tier_count_ - 1));
  }
}

void ChunkIndex::check_known(std::uint32_t chunk) const {
  if (chunk >= number_count_ || !entries_[chunk].known) {
    throw std::invalid_argument("chunk " + std::to_string(chunk) + " is not known");
  }
}

void ChunkIndex::check_known(std::span<const std::uint32_t> chunks) const {
  for (const std::uint32_t chunk : chunks) check_known(chunk);
}

void ChunkIndex::check_new(std::span<const ChunkKey> keys, std::span<const std::uint32_t> tokens,
                           std::span<const std::uint64_t> nbytes) const {
  if (tokens.size() != keys.size() || nbytes.size() != keys.size()) {
    throw std::invalid_argument(std::to_string(tokens.size()) + " token counts and " +
                                std::to_string(nbytes.size()) + " sizes for " +
                                std::to_string(keys.size()) + " keys");
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == 0) {
      throw std::invalid_argument("the chunk at position " + std::to_string(i) +
                                  " covers 0 tokens, must be at least 1");
    }
  }
}

void ChunkIndex::prefetch_slot(const ChunkKey& key) const {
  if (!slots_.empty()) __builtin_prefetch(&slots_[hash_of(key) & (slots_.size() - 1)]);
}

void ChunkIndex::prefetch_entry(const ChunkKey& key) const {
  if (slots_.empty()) return;
  const std::uint32_t hash = hash_of(key);
  // Almost always the home slot or one right after it; a longer search is not worth doing twice.
  for (std::size_t step = 0; step < 4; ++step) {
    const Slot& slot = slots_[(hash + step) & (slots_.size() - 1)];
    if (slot.chunk == kNone) return;
    if (slot.hash == hash) {
      const Entry& entry = entries_[slot.chunk];
      __builtin_prefetch(&entry.key);
      __builtin_prefetch(&entry.tiers);  // may be the next cache line
      return;
    }
  }
}

std::uint32_t ChunkIndex::find(const ChunkKey& key) const {
  if (slots_.empty()) return kNone;
  const std::uint32_t hash = hash_of(key);
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t i = hash & mask;; i = (i + 1) & mask) {  // ends: a quarter of the slots is free
    const Slot& slot = slots_[i];
    if (slot.chunk == kNone) return kNone;
    if (slot.hash == hash && entries_[slot.chunk].key == key) return slot.chunk;
  }
}

std::uint32_t ChunkIndex::find_held(const ChunkKey& key) const {
  const std::uint32_t chunk = find(key);
  return chunk != kNone && entries_[chunk].tiers != 0 ? chunk : kNone;
}

void ChunkIndex::reserve_for(std::span<const std::uint32_t> found) {
  const auto unknown_count =
      static_cast<std::size_t>(std::count(found.begin(), found.end(), kNone));
  const std::size_t fresh_count = unknown_count - std::min(unknown_count, free_count_);
  // The two highest numbers have a meaning of their own: "none" here, "absent" in LruOrder.
  if (fresh_count > kNone - 1 - number_count_) {
    throw std::invalid_argument(std::to_string(number_count_ + fresh_count) + " chunks, at most " +
                                std::to_string(kNone - 1));
  }
  const auto number_end = static_cast<std::uint32_t>(number_count_ + fresh_count);
  for (std::uint32_t number = number_count_; number < number_end; ++number) entries_.ensure(number);

  const std::size_t slots_needed = (size_ + unknown_count) * 4 / 3 + 1;
  if (slots_needed <= slots_.size()) return;
  std::vector<Slot> bigger(std::bit_ceil(std::max(slots_needed, kSlotsMin)));
  bigger.swap(slots_);
  for (const Slot& slot : bigger) {
    if (slot.chunk != kNone) insert_slot(slot);
  }
}

void ChunkIndex::insert_slot(Slot slot) {
  const std::size_t mask = slots_.size() - 1;
  std::size_t i = slot.hash & mask;
  while (slots_[i].chunk != kNone) i = (i + 1) & mask;
  slots_[i] = slot;
}

void ChunkIndex::erase_slot(std::uint32_t chunk) {
  const std::size_t mask = slots_.size() - 1;
  std::size_t hole = hash_of(entries_[chunk].key) & mask;
  while (slots_[hole].chunk != chunk) hole = (hole + 1) & mask;
  // Later ones of the same stretch move up, so no tombstones build up: each that would not be
  // found with the hole before it, that is, whose home is at or before the hole.
  for (std::size_t i = (hole + 1) & mask; slots_[i].chunk != kNone; i = (i + 1) & mask) {
    const std::size_t from_home = (i - slots_[i].hash) & mask;
    const std::size_t from_hole = (i - hole) & mask;
    if (from_home >= from_hole) {
      slots_[hole] = slots_[i];
      hole = i;
    }
  }
  slots_[hole] = Slot{};
}

std::uint32_t ChunkIndex::insert(const ChunkKey& key, std::uint32_t tokens, std::uint64_t nbytes) {
  if (const std::uint32_t chunk = find(key); chunk != kNone) return chunk;
  std::uint32_t chunk = first_free_;
  if (chunk != kNone) {
    first_free_ = entries_[chunk].next_sibling;
    --free_count_;
  } else {
    chunk = number_count_++;
  }
  Entry& entry = entries_[chunk];
  entry = Entry{};
  entry.key = key;
  entry.known = true;
  entry.tokens = tokens;
  entry.nbytes = nbytes;
  set_parentless(entry, true);
  insert_slot({hash_of(key), chunk});
  ++size_;
  return chunk;
}

void ChunkIndex::let_go(std::uint32_t chunk) {
  Entry& entry = entries_[chunk];
  for (std::uint32_t child = entry.first_child; child != kNone;) {
    Entry& left = entries_[child];
    child = left.next_sibling;
    left.parent = left.next_sibling = left.previous_sibling = kNone;
    set_parentless(left, true);
  }
  detach(chunk);
  erase_slot(chunk);
  entry = Entry{};
  entry.next_sibling = first_free_;
  first_free_ = chunk;
  ++free_count_;
  --size_;
}

ChunkIndex::WidthCounts& ChunkIndex::counts_of(const Entry& entry) {
  return entry.orphan ? orphans_ : roots_;
}

void ChunkIndex::set_parentless(Entry& entry, bool orphan) {
  entry.orphan = orphan;
  ++counts_of(entry)[static_cast<std::size_t>(std::bit_width(entry.tokens))];
}

void ChunkIndex::attach(std::uint32_t chunk, std::uint32_t parent) {
  Entry& entry = entries_[chunk];
  if (entry.parent != kNone) return;
  if (parent == kNone) {
    if (!entry.orphan) return;
    detach(chunk);
    set_parentless(entry, false);
    return;
  }
  // Honest keys form no cycle, but `add_linked` is fed from disks, and `suffix` must end.
  if (is_self_or_ancestor(chunk, parent)) return;
  detach(chunk);
  entry.orphan = false;
  Entry& above = entries_[parent];
  entry.parent = parent;
  entry.next_sibling = above.first_child;
  if (above.first_child != kNone) entries_[above.first_child].previous_sibling = chunk;
  above.first_child = chunk;
  if (entry.tokens < above.tokens) ++above.partial_children;
}

void ChunkIndex::detach(std::uint32_t chunk) {
  Entry& entry = entries_[chunk];
  if (entry.parent == kNone) {
    --counts_of(entry)[static_cast<std::size_t>(std::bit_width(entry.tokens))];
    return;
  }
  Entry& above = entries_[entry.parent];
  if (entry.previous_sibling == kNone) {
    above.first_child = entry.next_sibling;
  } else {
    entries_[entry.previous_sibling].next_sibling = entry.next_sibling;
  }
  if (entry.next_sibling != kNone) {
    entries_[entry.next_sibling].previous_sibling = entry.previous_sibling;
  }
  if (entry.tokens < above.tokens) --above.partial_children;
  entry.parent = entry.next_sibling = entry.previous_sibling = kNone;
}

bool ChunkIndex::is_self_or_ancestor(std::uint32_t candidate, std::uint32_t chunk) const {
  if (candidate == chunk) return true;
  if (entries_[candidate].first_child == kNone) return false;  // the usual case: it is new
  for (chunk = entries_[chunk].parent; chunk != kNone; chunk = entries_[chunk].parent) {
    if (chunk == candidate) return true;
  }
  return false;
}

}  // namespace kvtier
