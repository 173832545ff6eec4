// The table under crowded keys, the tree under damage, and the order of use, against plain models.
// What the calls mean is tested from Python; this is what only bytes of one's own choice can reach.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "kvtier/chunk_index.hpp"
#include "kvtier/lru_order.hpp"

namespace {

using kvtier::ChunkIndex;
using kvtier::ChunkKey;
using kvtier::LruOrder;
using Numbers = std::vector<std::uint32_t>;

constexpr std::uint32_t kNone = ChunkIndex::kNone;

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

/// A key whose table hash is `hash`; `rest` tells it from others of the same hash.
ChunkKey key_of(std::uint32_t hash, std::uint8_t rest) {
  ChunkKey key = {};
  for (std::size_t i = 0; i < 4; ++i) key[i] = static_cast<std::uint8_t>(hash >> (8 * i));
  key[31] = static_cast<std::uint8_t>(rest + 1);  // never the zeros that mean "root"
  return key;
}

std::uint32_t add_root(ChunkIndex& index, const ChunkKey& key) {
  return index.add(kNone, {{key}}, {{4}}, {{1}}).front();
}

void every_key_is_found_while_crowded_ones_come_and_go() {
  std::mt19937 random(1);
  ChunkIndex index(1);
  std::map<ChunkKey, std::uint32_t> model;
  std::vector<ChunkKey> all;
  // Homes crowd at both ends of any table, so stretches run into each other and wrap around.
  for (std::uint32_t hash = 0; hash < 12; ++hash) {
    for (std::uint8_t rest = 0; rest < 4; ++rest) {
      all.push_back(key_of(hash, rest));
      all.push_back(key_of(~hash, rest));
    }
  }
  for (int step = 0; step < 20000; ++step) {
    const ChunkKey& key = all[random() % all.size()];
    if (const auto at = model.find(key); at != model.end()) {
      check(index.withdraw({{at->second}}, 0) == Numbers{at->second}, "no tier holds it now");
      model.erase(at);
    } else {
      model[key] = add_root(index, key);
    }
    check(index.size() == model.size(), "as many as in the model");
    if (step % 16 != 0) continue;
    const Numbers found = index.find(all);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto at = model.find(all[i]);
      check(found[i] == (at == model.end() ? kNone : at->second), "each has its own number");
    }
  }
}

void growing_loses_no_key_and_moves_no_number() {
  std::mt19937 random(2);
  ChunkIndex index(1);
  std::vector<ChunkKey> keys;
  Numbers numbers;
  for (std::uint32_t i = 0; i < 5000; ++i) {
    keys.push_back(key_of(static_cast<std::uint32_t>(random()), static_cast<std::uint8_t>(i)));
    numbers.push_back(add_root(index, keys.back()));
  }
  check(index.find(keys) == numbers, "all are found");
  check(index.keys(numbers) == keys, "each number has its key");
  check(std::set<std::uint32_t>(numbers.begin(), numbers.end()).size() == 5000, "all differ");
}

void keys_that_would_form_a_cycle_are_left_without_a_parent() {
  ChunkIndex index(1);
  const ChunkKey a = key_of(1, 0);
  const ChunkKey b = key_of(2, 0);
  const ChunkKey c = key_of(3, 0);
  const Numbers numbers = index.add_linked({{a, b, c}}, {{c, a, b}}, {{4, 4, 4}}, {{1, 1, 1}});
  int parentless = 0;
  for (const std::uint32_t chunk : numbers) {
    parentless += index.parent(chunk) == kNone ? 1 : 0;
    check(index.suffix(chunk).size() < 3, "nobody is its own descendant");
  }
  check(parentless == 1, "one link of the ring is missing");
  const ChunkKey own = key_of(4, 0);
  const Numbers twice = index.add(kNone, {{own, own}}, {{4, 4}}, {{1, 1}});
  check(twice[0] == twice[1] && index.suffix(twice[0]).empty(), "nobody is its own child");
}

void the_tree_follows_a_model_through_random_growth_and_loss() {
  std::mt19937 random(3);
  ChunkIndex index(1);
  std::map<std::uint32_t, std::uint32_t> parents;
  std::uint32_t fresh = 0;
  for (int step = 0; step < 4000; ++step) {
    std::uint32_t chosen = kNone;
    if (!parents.empty() && random() % 8 != 0) {
      chosen = std::next(parents.begin(), static_cast<long>(random() % parents.size()))->first;
    }
    if (parents.size() < 60 && random() % 3 != 0) {
      const std::uint32_t added =
          index.add(chosen, {{key_of(fresh++, 0)}}, {{1 + fresh % 4}}, {{1}}).front();
      check(!parents.contains(added), "a new number");
      parents[added] = chosen;
    } else if (chosen != kNone) {
      index.withdraw({{chosen}}, 0);
      parents.erase(chosen);
      for (auto& [chunk, parent] : parents) parent = parent == chosen ? kNone : parent;
    }
    for (const auto& [chunk, parent] : parents) {
      check(index.parent(chunk) == parent, "the same parent");
      Numbers expected;
      for (const auto& [other, above] : parents) {
        if (above == chunk) expected.push_back(other);
      }
      Numbers children = index.children(chunk);
      std::ranges::sort(children);
      check(children == expected, "the same children");
      std::set<std::uint32_t> before = {chunk};
      for (const std::uint32_t below : index.suffix(chunk)) {
        check(before.contains(parents.at(below)), "parents before children");
        check(before.insert(below).second, "each descendant once");
      }
      for (const auto& [other, above] : parents) {
        check(!before.contains(above) || before.contains(other), "no descendant is missing");
      }
    }
  }
}

void a_failed_release_changes_no_count() {
  ChunkIndex index(1);
  const std::uint32_t a = add_root(index, key_of(1, 0));
  const std::uint32_t b = add_root(index, key_of(2, 0));
  index.lease({{a, a, b}});
  check_refused([&] { index.release({{a, b, a, b}}); }, "b is leased once only");
  check(index.leases({{a, b}}) == Numbers{2, 1}, "all counts are as before");
  index.release({{a, b, a}});
  check(index.size() == 0, "nothing keeps them");
}

void a_lookup_reads_little_beyond_what_it_finds() {
  ChunkIndex index(1);
  std::vector<std::uint32_t> tokens(4 * 1000);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint32_t>(i);
  std::vector<ChunkKey> keys(1000);
  const ChunkKey root = key_of(9, 9);
  kvtier::chain_keys(root, tokens, 4, keys);
  for (const std::size_t held : {0U, 1U, 2U, 7U, 100U, 1000U}) {
    const auto run = std::span(keys).first(held);
    const Numbers numbers =
        index.add(kNone, run, Numbers(held, 4), std::vector<std::uint64_t>(held, 1));
    index.publish(numbers, 0);
    std::size_t end = 0;
    const auto read = [&](std::size_t first, std::size_t count) {
      end = std::max(end, first + count);
      return std::span<const std::uint32_t>(tokens).subspan(first, count);
    };
    check(index.lookup(root, tokens.size(), read, 4, 1) == numbers, "what is held is found");
    check(end <= 4 * std::min(held + std::min<std::size_t>(held + 1, 16), keys.size()),
          "at most one chunk more than the run again, at most 16");
  }
}

void the_order_of_use_follows_a_list() {
  std::mt19937 random(4);
  LruOrder order;
  std::list<std::uint32_t> model;  // oldest first
  for (int step = 0; step < 5000; ++step) {
    Numbers chunks(random() % 6);
    for (auto& chunk : chunks) chunk = static_cast<std::uint32_t>(random() % 40 * 997);
    const auto action = random() % 3;
    if (action == 0) {
      order.remove(chunks);
      for (const std::uint32_t chunk : chunks) model.remove(chunk);
    } else {
      order.touch(chunks, action == 1);
      for (auto at = chunks.rbegin(); at != chunks.rend(); ++at) {
        if (model.remove(*at) != 0 || action == 1) model.push_back(*at);
      }
    }
    check(order.size() == model.size(), "as many as in the list");
    check(order.oldest(1000) == Numbers(model.begin(), model.end()), "in the list's order");
  }
  check_refused([&] { order.touch({{1, 0xFFFFFFFE}}, true); }, "a number that means absence");
  check(order.size() == model.size(), "nothing entered with it");
  order.touch({{kNone, 0xFFFFFFFE}}, false);
  order.remove({{kNone, 0xFFFFFFFE}});
  check(order.oldest(1000) == Numbers(model.begin(), model.end()), "unknown ones are passed over");
}

}  // namespace

int main() {
  every_key_is_found_while_crowded_ones_come_and_go();
  growing_loses_no_key_and_moves_no_number();
  keys_that_would_form_a_cycle_are_left_without_a_parent();
  the_tree_follows_a_model_through_random_growth_and_loss();
  a_failed_release_changes_no_count();
  a_lookup_reads_little_beyond_what_it_finds();
  the_order_of_use_follows_a_list();
}
