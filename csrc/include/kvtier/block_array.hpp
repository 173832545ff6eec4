// An array that grows in blocks: elements never move and growing copies nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvtier {

/// Elements by number; those of one block come to be together, value-initialised.
///
/// A doubling vector would leave up to half its memory idle and stop the world to copy hundreds of
/// megabytes; here at most one block is idle at the end, and a sparse use pays per block touched.
template <typename Element>
class BlockArray {
 public:
  BlockArray() = default;
  BlockArray(BlockArray&&) = default;
  BlockArray& operator=(BlockArray&&) = default;

  /// Makes element `number` usable. May throw std::bad_alloc; nothing visible has changed then.
  void ensure(std::uint32_t number) {
    const std::size_t block = number / kBlockElements;
    if (block >= blocks_.size()) blocks_.resize(block + 1);
    if (!blocks_[block]) {
      blocks_[block] = std::make_unique<Element[]>(kBlockElements);
      ++allocated_count_;
    }
  }

  bool has(std::uint32_t number) const {
    const std::size_t block = number / kBlockElements;
    return block < blocks_.size() && blocks_[block] != nullptr;
  }

  /// `number` must have been ensured.
  Element& operator[](std::uint32_t number) {
    return blocks_[number / kBlockElements][number % kBlockElements];
  }
  const Element& operator[](std::uint32_t number) const {
    return blocks_[number / kBlockElements][number % kBlockElements];
  }

  std::size_t memory_bytes() const {
    return allocated_count_ * kBlockElements * sizeof(Element) +
           blocks_.capacity() * sizeof(blocks_[0]);
  }

 private:
  static constexpr std::uint32_t kBlockElements = 1024;  // one million need a directory of 8 KB

  std::vector<std::unique_ptr<Element[]>> blocks_;
  std::size_t allocated_count_ = 0;
};

}  // namespace kvtier
