// ChunkIndex and LruOrder in Python. The GIL is kept: calls take microseconds, and whoever gave it
// up could wait milliseconds to get it back, with the caller's lock in hand.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "bindings.hpp"
#include "kvtier/chunk_index.hpp"
#include "kvtier/lru_order.hpp"
#include "tokens.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvtier::bindings {
namespace {

template <typename Item>
using Input = nb::ndarray<const Item, nb::ndim<1>, nb::device::cpu>;

template <typename Item>
using Output = nb::ndarray<nb::numpy, Item, nb::ndim<1>>;

using Numbers = Input<std::uint32_t>;

/// An array argument as a span, copied only if it is a strided view. Lives no longer than it.
template <typename Item>
class Items {
 public:
  explicit Items(const Input<Item>& array) : items_(array.data(), array.shape(0)) {
    if (array.stride(0) == 1 || array.shape(0) < 2) return;
    copy_.reserve(array.shape(0));
    for (std::size_t i = 0; i < array.shape(0); ++i) copy_.push_back(array(i));
    items_ = copy_;
  }
  Items(const Items&) = delete;
  Items& operator=(const Items&) = delete;

  operator std::span<const Item>() const { return items_; }

 private:
  std::vector<Item> copy_;
  std::span<const Item> items_;
};

/// An array argument that is never cast: a wider number would lose its upper half in silence.
auto array(const char* name) { return nb::arg(name).noconvert(); }

template <typename Item>
Output<Item> to_numpy(std::vector<Item> items) {
  auto owned = std::make_unique<std::vector<Item>>(std::move(items));
  Item* const first = owned->data();
  const std::size_t count = owned->size();
  const nb::capsule owner(owned.get(), [](void* p) noexcept {
    std::unique_ptr<std::vector<Item>>(static_cast<std::vector<Item>*>(p));
  });
  owned.release();  // the capsule's now
  return Output<Item>(first, {count}, owner);
}

std::vector<ChunkKey> to_keys(const nb::bytes& bytes) {
  if (bytes.size() % sizeof(ChunkKey) != 0) {
    throw std::invalid_argument(std::to_string(bytes.size()) + " bytes of keys, must be " +
                                std::to_string(sizeof(ChunkKey)) + " each");
  }
  std::vector<ChunkKey> keys(bytes.size() / sizeof(ChunkKey));
  std::copy_n(static_cast<const char*>(bytes.data()), bytes.size(),
              reinterpret_cast<char*>(keys.data()));
  return keys;
}

Output<std::uint32_t> lookup(const ChunkIndex& index, const nb::bytes& root,
                             nb::handle tokens_argument, std::size_t chunk_tokens,
                             std::size_t page_tokens) {
  if (root.size() != sizeof(ChunkKey)) {
    throw std::invalid_argument("a key of " + std::to_string(root.size()) + " bytes, must be " +
                                std::to_string(sizeof(ChunkKey)));
  }
  const Tokens tokens(tokens_argument);
  std::vector<std::uint32_t> scratch;
  const auto read = [&](std::size_t first, std::size_t count) {
    return tokens.read(first, count, scratch);
  };
  return to_numpy(
      index.lookup(to_keys(root).front(), tokens.size(), read, chunk_tokens, page_tokens));
}

void bind_chunk_index(nb::module_& m) {
  nb::class_<ChunkIndex> index(
      m, "ChunkIndex",
      "key -> chunk number, with the prefix tree, the tiers that hold each chunk, and leases.\n\n"
      "A number names its chunk while the chunk is known: from `add` until no tier holds it and\n"
      "no lease counts on it. Not thread-safe: the caller holds one lock. Unknown numbers, bad\n"
      "tiers and ragged arrays raise ValueError and change nothing.");
  index.attr("NONE") = ChunkIndex::kNone;
  index.def(nb::init<int>(), "tier_count"_a)
      .def("__len__", &ChunkIndex::size)
      .def_prop_ro("memory_bytes", &ChunkIndex::memory_bytes,
                   "Everything allocated now; room of chunks let go is kept and used again.")
      .def("lookup", lookup, "root"_a, "tokens"_a, "chunk_tokens"_a, "page_tokens"_a,
           "The longest run of whole chunks that some tier holds, and after it, if one is held,\n"
           "the longest partial chunk of a multiple of `page_tokens` tokens.")
      .def(
          "find",
          [](const ChunkIndex& self, const nb::bytes& keys) {
            return to_numpy(self.find(to_keys(keys)));
          },
          "keys"_a, "The number of each 32-byte key, NONE where it is unknown.")
      .def(
          "add",
          [](ChunkIndex& self, std::uint32_t parent, const nb::bytes& keys, const Numbers& tokens,
             const Input<std::uint64_t>& nbytes) {
            return to_numpy(self.add(parent, to_keys(keys), Items(tokens), Items(nbytes)));
          },
          "parent"_a, "keys"_a, array("tokens"), array("nbytes"),
          "Make a run of keys known: the first continues `parent` (NONE: a root), each further\n"
          "one its predecessor. Known keys keep their number; an orphan gets its parent back.")
      .def(
          "add_linked",
          [](ChunkIndex& self, const nb::bytes& keys, const nb::bytes& parent_keys,
             const Numbers& tokens, const Input<std::uint64_t>& nbytes) {
            return to_numpy(
                self.add_linked(to_keys(keys), to_keys(parent_keys), Items(tokens), Items(nbytes)));
          },
          "keys"_a, "parent_keys"_a, array("tokens"), array("nbytes"),
          "Make chunks known in any order, each with its parent's key, 32 zero bytes for a root.\n"
          "One whose parent is neither known nor among `keys` has NONE as its parent.")
      .def(
          "publish",
          [](ChunkIndex& self, const Numbers& chunks, int tier) {
            self.publish(Items(chunks), tier);
          },
          array("chunks"), "tier"_a, "Say that `tier` holds these chunks.")
      .def(
          "withdraw",
          [](ChunkIndex& self, const Numbers& chunks, int tier) {
            return to_numpy(self.withdraw(Items(chunks), tier));
          },
          array("chunks"), "tier"_a,
          "Say that `tier` holds them no longer; gives those that no tier holds now, each once:\n"
          "let go, but for the leased ones.")
      .def(
          "lease", [](ChunkIndex& self, const Numbers& chunks) { self.lease(Items(chunks)); },
          array("chunks"), "Count one more lease on each.")
      .def(
          "release", [](ChunkIndex& self, const Numbers& chunks) { self.release(Items(chunks)); },
          array("chunks"), "Undo `lease`; chunks that nothing else keeps are let go.")
      .def(
          "suffix",
          [](const ChunkIndex& self, std::uint32_t chunk) { return to_numpy(self.suffix(chunk)); },
          "chunk"_a, "Every known descendant, parents before children.")
      .def(
          "children",
          [](const ChunkIndex& self, std::uint32_t chunk) {
            return to_numpy(self.children(chunk));
          },
          "chunk"_a, "The known chunks that continue this one, in no order.")
      .def("parent", &ChunkIndex::parent, "chunk"_a,
           "The chunk that this one continues; NONE for a root or an orphan.")
      .def(
          "held", [](const ChunkIndex& self, int tier) { return to_numpy(self.held(tier)); },
          "tier"_a, "Every chunk that `tier` holds, by ascending number.")
      .def(
          "tiers",
          [](const ChunkIndex& self, const Numbers& chunks) {
            return to_numpy(self.tiers(Items(chunks)));
          },
          array("chunks"), "Bit t is set where tier t holds the chunk.")
      .def(
          "tokens",
          [](const ChunkIndex& self, const Numbers& chunks) {
            return to_numpy(self.tokens(Items(chunks)));
          },
          array("chunks"), "How many tokens each covers.")
      .def(
          "nbytes",
          [](const ChunkIndex& self, const Numbers& chunks) {
            return to_numpy(self.nbytes(Items(chunks)));
          },
          array("chunks"), "The size of each one's record.")
      .def(
          "keys",
          [](const ChunkIndex& self, const Numbers& chunks) {
            const std::vector<ChunkKey> keys = self.keys(Items(chunks));
            return nb::bytes(keys.data(), keys.size() * sizeof(ChunkKey));
          },
          array("chunks"), "Their keys, 32 bytes each, concatenated.")
      .def(
          "leases",
          [](const ChunkIndex& self, const Numbers& chunks) {
            return to_numpy(self.leases(Items(chunks)));
          },
          array("chunks"), "How many leases count on each.");
}

void bind_lru_order(nb::module_& m) {
  nb::class_<LruOrder>(m, "LruOrder",
                       "Chunk numbers in order of last use; O(1) a chunk. Not thread-safe.")
      .def(nb::init<>())
      .def(
          "touch",
          [](LruOrder& self, const Numbers& chunks, bool insert) {
            self.touch(Items(chunks), insert);
          },
          array("chunks"), "insert"_a,
          "Make them the most recent, the last of them first, so that the root side of a run\n"
          "outlives its leaves. Those not in the order enter it if `insert`, else are passed over.")
      .def(
          "remove", [](LruOrder& self, const Numbers& chunks) { self.remove(Items(chunks)); },
          array("chunks"), "Take them out; those that are not in are passed over.")
      .def(
          "oldest",
          [](const LruOrder& self, std::size_t count) { return to_numpy(self.oldest(count)); },
          "count"_a, "The `count` least recent (or all, if fewer), least recent first.")
      .def("__len__", &LruOrder::size)
      .def("__contains__", &LruOrder::contains, "chunk"_a)
      .def_prop_ro("memory_bytes", &LruOrder::memory_bytes, "Everything allocated now.");
}

}  // namespace

void bind_index(nb::module_& m) {
  bind_chunk_index(m);
  bind_lru_order(m);
}

}  // namespace kvtier::bindings
