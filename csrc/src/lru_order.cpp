#include "kvtier/lru_order.hpp"

#include <algorithm>
#include <ranges>
#include <stdexcept>
#include <string>

namespace kvtier {

void LruOrder::touch(std::span<const std::uint32_t> chunks, bool insert) {
  if (insert) {
    for (const std::uint32_t chunk : chunks) {
      if (chunk >= kAbsent) {
        throw std::invalid_argument("chunk number " + std::to_string(chunk) + ", at most " +
                                    std::to_string(kAbsent - 1));
      }
    }
    for (const std::uint32_t chunk : chunks) nodes_.ensure(chunk);
  }
  // A run's nodes may lie anywhere; fetched together they cost about as much as one or two.
  for (const std::uint32_t chunk : chunks) {
    if (nodes_.has(chunk)) __builtin_prefetch(&nodes_[chunk], 1);
  }
  for (const std::uint32_t chunk : std::views::reverse(chunks)) {
    if (contains(chunk)) {
      unlink(chunk);
    } else if (!insert) {
      continue;
    }
    link_newest(chunk);
  }
}

void LruOrder::remove(std::span<const std::uint32_t> chunks) {
  for (const std::uint32_t chunk : chunks) {
    if (contains(chunk)) unlink(chunk);
  }
}

std::vector<std::uint32_t> LruOrder::oldest(std::size_t count) const {
  std::vector<std::uint32_t> chunks;
  chunks.reserve(std::min(count, size_));
  for (std::uint32_t chunk = oldest_; chunk != kNone && chunks.size() < count;
       chunk = nodes_[chunk].newer) {
    chunks.push_back(chunk);
  }
  return chunks;
}

void LruOrder::unlink(std::uint32_t chunk) {
  Node& node = nodes_[chunk];
  (node.newer == kNone ? newest_ : nodes_[node.newer].older) = node.older;
  (node.older == kNone ? oldest_ : nodes_[node.older].newer) = node.newer;
  node = Node{};
  --size_;
}

void LruOrder::link_newest(std::uint32_t chunk) {
  nodes_[chunk] = Node{.newer = kNone, .older = newest_};
  (newest_ == kNone ? oldest_ : nodes_[newest_].newer) = chunk;
  newest_ = chunk;
  ++size_;
}

}  // namespace kvtier
