// Which chunks are known, which tiers hold them, which prefix they continue, who leases them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kvtier/block_array.hpp"
#include "kvtier/chunk_keys.hpp"

namespace kvtier {

/// key -> chunk number, with the prefix tree, a bit per tier that holds the chunk, and a count of
/// leases. A number names its chunk for as long as the chunk is known; later another may get it.
///
/// A chunk is known from `add` until it is let go: by the `withdraw` that leaves it to no tier
/// while nothing leases it, or by the `release` of the last lease while no tier holds it. Children
/// of a chunk that is let go lose their parent; callers who mind withdraw `suffix` first.
///
/// Not thread-safe: the caller holds one lock. Every call that is given an unknown chunk number, a
/// bad tier or ragged arrays throws std::invalid_argument and has changed nothing.
///
/// Cost: 72 bytes a chunk, and 11 to 22 of hash table. A call on n chunks costs n cache misses or
/// so, overlapped; `lookup` is bound by SHA-256 (17 blocks for 256 tokens).
class ChunkIndex {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;
  static constexpr int kTierCountMax = 8;  // a chunk's tiers are the bits of one byte

  /// Gives the `count` tokens from `first` on; they stay valid until the next call.
  using ReadTokens =
      std::function<std::span<const std::uint32_t>(std::size_t first, std::size_t count)>;

  explicit ChunkIndex(int tier_count);

  std::size_t size() const { return size_; }

  /// Everything allocated now. Room of chunks let go is kept and used again.
  std::size_t memory_bytes() const;

  /// The longest run of whole chunks from `root` on that some tier holds, and after it, if one is
  /// held, the longest partial chunk of a multiple of `page_tokens` tokens.
  ///
  /// Reads tokens from the front, and little beyond the run: at most one chunk more than the run
  /// itself has, and never more than 16.
  std::vector<std::uint32_t> lookup(const ChunkKey& root, std::size_t token_count,
                                    const ReadTokens& read, std::size_t chunk_tokens,
                                    std::size_t page_tokens) const;

  /// The number of each key, `kNone` where it is unknown.
  std::vector<std::uint32_t> find(std::span<const ChunkKey> keys) const;

  /// Makes a run of keys known: the first continues chunk `parent` (or `kNone`, a root), each
  /// further one its predecessor. Known keys keep their number and what is known of them; one that
  /// had lost its parent gets it back.
  ///
  /// `tokens` is how many tokens each chunk covers, at least one. Fewer than its parent's make it
  /// a partial chunk, which `lookup` relies on.
  std::vector<std::uint32_t> add(std::uint32_t parent, std::span<const ChunkKey> keys,
                                 std::span<const std::uint32_t> tokens,
                                 std::span<const std::uint64_t> nbytes);

  /// The same for chunks in any order, each with its parent's key; a key of zeros means a root.
  /// One whose parent is neither known nor among `keys` stays without.
  std::vector<std::uint32_t> add_linked(std::span<const ChunkKey> keys,
                                        std::span<const ChunkKey> parent_keys,
                                        std::span<const std::uint32_t> tokens,
                                        std::span<const std::uint64_t> nbytes);

  /// Says that `tier` holds these chunks.
  void publish(std::span<const std::uint32_t> chunks, int tier);

  /// Says that `tier` holds them no longer. Gives those that no tier holds now, each once: let go,
  /// but for the leased ones.
  std::vector<std::uint32_t> withdraw(std::span<const std::uint32_t> chunks, int tier);

  void lease(std::span<const std::uint32_t> chunks);

  /// Undoes `lease`. Throws std::invalid_argument if that is more than the leases there are.
  void release(std::span<const std::uint32_t> chunks);

  /// Every known descendant, parents before children.
  std::vector<std::uint32_t> suffix(std::uint32_t chunk) const;
  std::vector<std::uint32_t> children(std::uint32_t chunk) const;
  std::uint32_t parent(std::uint32_t chunk) const;

  /// Every chunk that `tier` holds, by ascending number. Walks the whole index.
  std::vector<std::uint32_t> held(int tier) const;

  std::vector<std::uint8_t> tiers(std::span<const std::uint32_t> chunks) const;
  std::vector<std::uint32_t> tokens(std::span<const std::uint32_t> chunks) const;
  std::vector<std::uint64_t> nbytes(std::span<const std::uint32_t> chunks) const;
  std::vector<std::uint32_t> leases(std::span<const std::uint32_t> chunks) const;
  std::vector<ChunkKey> keys(std::span<const std::uint32_t> chunks) const;

 private:
  struct Entry {
    ChunkKey key = {};       // with `tiers` behind it: all that a lookup reads
    std::uint8_t tiers = 0;  // bit t: tier t holds the chunk
    bool known = false;      // else the number is free
    bool orphan = false;     // has no parent though it is no root
    bool seen = false;       // scratch of `withdraw`, false between calls
    std::uint32_t tokens = 0;
    std::uint64_t nbytes = 0;
    std::uint32_t leases = 0;
    std::uint32_t parent = kNone;
    std::uint32_t first_child = kNone;
    std::uint32_t next_sibling = kNone;  // of a free number: the next free one
    std::uint32_t previous_sibling = kNone;
    std::uint32_t partial_children = 0;  // how many cover fewer tokens than this chunk
  };
  static_assert(sizeof(Entry) == 72, "a million chunks should stay near 90 MB");

  // `hash` is the key's first four bytes: the home slot and, above that, a filter that spares
  // most visits to entries with another key.
  struct Slot {
    std::uint32_t hash = 0;
    std::uint32_t chunk = kNone;
  };

  // How many chunks without a parent cover how many tokens, by bit width: tells without fail that
  // there is none below some length, and nearly always that there is one.
  using WidthCounts = std::array<std::uint32_t, 33>;

  void check_tier(int tier) const;
  void check_known(std::uint32_t chunk) const;
  void check_known(std::span<const std::uint32_t> chunks) const;
  void check_new(std::span<const ChunkKey> keys, std::span<const std::uint32_t> tokens,
                 std::span<const std::uint64_t> nbytes) const;

  void prefetch_slot(const ChunkKey& key) const;
  void prefetch_entry(const ChunkKey& key) const;
  std::uint32_t find(const ChunkKey& key) const;
  std::uint32_t find_held(const ChunkKey& key) const;
  std::uint32_t find_longest_partial(const ChunkKey& parent_key, std::uint32_t parent,
                                     std::size_t first, std::size_t count, const ReadTokens& read,
                                     std::size_t chunk_tokens, std::size_t page_tokens) const;

  // Room for one new chunk per `kNone` in `found`, so that nothing can fail halfway.
  void reserve_for(std::span<const std::uint32_t> found);
  void insert_slot(Slot slot);
  void erase_slot(std::uint32_t chunk);

  // The chunk of this key: the one that is known, else a new orphan.
  std::uint32_t insert(const ChunkKey& key, std::uint32_t tokens, std::uint64_t nbytes);
  void let_go(std::uint32_t chunk);

  WidthCounts& counts_of(const Entry& entry);
  void set_parentless(Entry& entry, bool orphan);
  // Hangs a chunk without a parent on `parent`, or makes it a root if that is `kNone`.
  void attach(std::uint32_t chunk, std::uint32_t parent);
  // Takes it out of its parent's children, or out of the counts of those without a parent.
  void detach(std::uint32_t chunk);
  bool is_self_or_ancestor(std::uint32_t candidate, std::uint32_t chunk) const;

  template <typename Value>
  std::vector<Value> read_all(std::span<const std::uint32_t> chunks, Value Entry::* field) const;

  int tier_count_;
  std::size_t size_ = 0;
  BlockArray<Entry> entries_;
  std::uint32_t number_count_ = 0;  // numbers ever given out
  std::uint32_t first_free_ = kNone;
  std::size_t free_count_ = 0;
  std::vector<Slot> slots_;  // open addressing, linear probing, a power of two, at most 3/4 full
  WidthCounts roots_ = {};
  WidthCounts orphans_ = {};
};

}  // namespace kvtier
