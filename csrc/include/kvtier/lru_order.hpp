// Chunk numbers in order of last use; the LRU policy is made of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvtier/block_array.hpp"

namespace kvtier {

/// A doubly linked order over chunk numbers: every operation is O(1) a chunk, 8 bytes a chunk
/// where numbers are dense. Not thread-safe.
class LruOrder {
 public:
  /// Makes `chunks` the most recent, the last of them first, so that the first ends most recent.
  /// Given a run of one prefix, its root side thus outlives its leaves.
  ///
  /// Chunks not in the order enter it if `insert`, else are passed over.
  /// @throws std::invalid_argument for a number no chunk can have; nothing has changed then
  void touch(std::span<const std::uint32_t> chunks, bool insert);

  /// Takes `chunks` out; those that are not in are passed over.
  void remove(std::span<const std::uint32_t> chunks);

  /// The `count` least recent (or all, if fewer), least recent first.
  std::vector<std::uint32_t> oldest(std::size_t count) const;

  std::size_t size() const { return size_; }
  bool contains(std::uint32_t chunk) const {
    return nodes_.has(chunk) && nodes_[chunk].newer != kAbsent;
  }
  std::size_t memory_bytes() const { return sizeof(*this) + nodes_.memory_bytes(); }

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;    // the end of the order
  static constexpr std::uint32_t kAbsent = 0xFFFFFFFE;  // in `newer`: the chunk is not in the order

  struct Node {
    std::uint32_t newer = kAbsent;
    std::uint32_t older = kNone;
  };

  void unlink(std::uint32_t chunk);
  void link_newest(std::uint32_t chunk);

  BlockArray<Node> nodes_;
  std::size_t size_ = 0;
  std::uint32_t newest_ = kNone;
  std::uint32_t oldest_ = kNone;
};

}  // namespace kvtier
