// Copies against the plan's formula, byte by byte, on exact-size heap blocks, so that a sanitizer
// sees any byte touched outside; and the pool under several callers at once.
#include "kvtier/copy_plan.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using kvtier::CopyMode;
using kvtier::CopyPlan;
using kvtier::CopyRequest;
using kvtier::PageShape;
using kvtier::ThreadPool;
using Bytes = std::vector<std::uint8_t>;

void check(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

template <typename Call>
void check_refused(const Call& call, const std::string& what) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return;
  }
  check(false, what + " is refused");
}

std::uint64_t address(const Bytes& bytes) { return reinterpret_cast<std::uint64_t>(bytes.data()); }

Bytes random_bytes(std::size_t count, std::mt19937& random) {
  Bytes bytes(count);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

/// One random engine, a random wave of it, and the two chunks of a request.
struct Case {
  explicit Case(std::mt19937& random) {
    const auto up_to = [&random](std::uint64_t most) { return random() % most + 1; };
    shape.rows = up_to(4);
    shape.cols = up_to(4);
    shape.run_bytes = up_to(2) == 1 ? 64 * up_to(12) : up_to(700);
    const bool heads_first = up_to(2) == 1;
    const std::uint64_t gap = up_to(3) == 1 ? up_to(9) : 0;
    (heads_first ? shape.row_stride : shape.col_stride) = shape.run_bytes + gap;
    (heads_first ? shape.col_stride : shape.row_stride) =
        heads_first ? shape.rows * shape.row_stride : shape.cols * shape.col_stride;
    page_span = heads_first ? shape.cols * shape.col_stride : shape.rows * shape.row_stride;
    shape.page_count = up_to(7);
    const std::uint64_t planes = up_to(6);
    cross_layer = up_to(2) == 1;
    foreign = up_to(2) == 1 ? planes : 1;  // what is not copied lies behind the first plane or all
    shape.page_stride = cross_layer ? page_span * (planes + 1) : page_span;
    const std::size_t tensor_bytes = shape.page_count * shape.page_stride;
    for (std::uint64_t p = 0; p < planes; ++p) {
      if (p == 0 || !cross_layer) tensors.push_back(random_bytes(tensor_bytes, random));
      addresses.push_back(address(tensors.back()) + plane_offset(p));
    }
    first_plane = random() % planes;
    plane_count = up_to(planes - first_plane);
    for (std::uint64_t g = 0; g < shape.page_count; ++g) {
      page_ids.push_back(up_to(5) == 1 ? -1 : static_cast<std::int64_t>(g));
    }
    std::shuffle(page_ids.begin(), page_ids.end(), random);
    const auto middle = static_cast<std::uint32_t>(random() % (page_ids.size() + 1));
    page_offsets = {0, middle, static_cast<std::uint32_t>(page_ids.size())};
    for (std::size_t c = 0; c < 2; ++c) {
      const std::uint64_t pages = page_offsets[c + 1] - page_offsets[c];
      // One byte more, so that an empty chunk has an address too.
      segments.push_back(random_bytes(pages * plane_count * plane_bytes() + 1, random));
    }
  }

  std::uint64_t plane_offset(std::uint64_t p) const {
    return cross_layer ? (p < foreign ? p : p + 1) * page_span : 0;
  }

  std::uint64_t plane_bytes() const { return shape.rows * shape.cols * shape.run_bytes; }

  CopyRequest request() {
    segment_addresses = {address(segments[0]), address(segments[1])};
    return {page_ids, page_offsets, segment_addresses, first_plane, plane_count};
  }

  /// Calls `visit(paged byte, stored byte)` for every byte of the request.
  template <typename Visit>
  void for_each_byte(const Visit& visit) {
    for (std::size_t c = 0; c < 2; ++c) {
      std::uint64_t at = 0;
      for (std::size_t i = page_offsets[c]; i < page_offsets[c + 1]; ++i) {
        for (std::uint64_t p = first_plane; p < first_plane + plane_count; ++p) {
          Bytes& tensor = tensors[cross_layer ? 0 : p];
          for (std::uint64_t t = 0; t < shape.rows; ++t) {
            for (std::uint64_t h = 0; h < shape.cols; ++h) {
              for (std::uint64_t x = 0; x < shape.run_bytes; ++x, ++at) {
                if (page_ids[i] < 0) continue;
                const std::uint64_t place =
                    static_cast<std::uint64_t>(page_ids[i]) * shape.page_stride + plane_offset(p) +
                    t * shape.row_stride + h * shape.col_stride + x;
                visit(tensor[place], segments[c][at]);
              }
            }
          }
        }
      }
    }
  }

  PageShape shape{};
  std::uint64_t page_span = 0;
  bool cross_layer = false;
  std::uint64_t foreign = 0;
  std::vector<Bytes> tensors;
  std::vector<std::uint64_t> addresses;
  std::uint64_t first_plane = 0;
  std::uint64_t plane_count = 0;
  std::vector<std::int64_t> page_ids;
  std::vector<std::uint32_t> page_offsets;
  std::vector<Bytes> segments;
  std::vector<std::uint64_t> segment_addresses;
};

void every_mode_moves_what_the_formula_says() {
  ThreadPool pool(2);
  for (std::uint32_t seed = 0; seed < 600; ++seed) {
    std::mt19937 random(seed);
    Case made(random);
    const auto modes = kvtier::copy_modes();
    const CopyMode mode = modes[seed % modes.size()];
    const CopyPlan plan(made.addresses, made.shape);
    Case expected = made;
    std::uint64_t expected_bytes = 0;
    const bool gathers = seed % 2 == 0;
    expected.for_each_byte([&](std::uint8_t& paged, std::uint8_t& stored) {
      (gathers ? stored : paged) = gathers ? paged : stored;
      ++expected_bytes;
    });
    const std::uint64_t moved = gathers ? plan.gather(pool, made.request(), mode)
                                        : plan.scatter(pool, made.request(), mode);
    const std::string what = "seed " + std::to_string(seed);
    check(moved == expected_bytes, what + ": bytes moved");
    check(made.segments == expected.segments, what + ": segments");
    check(made.tensors == expected.tensors, what + ": tensors");
  }
}

void a_request_that_does_not_fit_is_refused() {
  ThreadPool pool(1);
  const Bytes tensor(4096);
  Bytes segment(4096);
  const std::vector<std::uint64_t> planes = {address(tensor)};
  const CopyPlan plan(planes, {4, 1024, 1, 0, 1, 0, 1024});
  const std::vector<std::uint64_t> segments = {address(segment)};
  const std::vector<std::uint32_t> offsets = {0, 2};
  for (const std::int64_t page : {std::int64_t{4}, std::int64_t{-2}, INT64_MAX, INT64_MIN}) {
    const std::vector<std::int64_t> ids = {0, page};
    check_refused([&] { plan.gather(pool, {ids, offsets, segments, 0, 1}, CopyMode::kAuto); },
                  "page " + std::to_string(page));
  }
  const std::vector<std::int64_t> ids = {0, 1};
  check_refused([&] { plan.gather(pool, {ids, offsets, segments, 0, 2}, CopyMode::kAuto); },
                "a second plane");
  check_refused([&] { plan.gather(pool, {ids, {}, segments, 0, 1}, CopyMode::kAuto); },
                "a request without offsets");
  check(segment == Bytes(4096), "nothing was copied");
  check_refused([&] { CopyPlan(planes, {1, 0, UINT64_MAX, 1, 1, 0, 2}); }, "a huge layout");
  check_refused([&] { CopyPlan({}, {1, 0, 1, 0, 1, 0, 1}); }, "a plan without planes");
}

void units_are_each_done_once_whoever_calls() {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong_count = 0;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&pool, &wrong_count] {
      for (std::size_t round = 0; round < 300; ++round) {
        std::vector<std::atomic<int>> done(round % 40);
        pool.run(done.size(), [&done](kvtier::WorkUnits& units) {
          for (std::size_t unit = 0; units.take(unit);) ++done[unit];
        });
        for (const auto& count : done) wrong_count += count == 1 ? 0 : 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  check(wrong_count == 0, "each unit is done once");
  check_refused([] { ThreadPool(0); }, "no thread");
  check_refused([] { ThreadPool(ThreadPool::kThreadCountMax + 1); }, "too many threads");
}

void pieces_of_any_length_are_copied() {
  ThreadPool pool(2);
  std::mt19937 random(5);
  for (const CopyMode mode : kvtier::copy_modes()) {
    std::vector<Bytes> sources;
    std::vector<Bytes> targets;
    std::vector<std::uint64_t> from;
    std::vector<std::uint64_t> to;
    std::vector<std::uint64_t> lengths;
    for (const std::size_t length : {3'000'001, 0, 1, 63, 64, 65, 1000, 1'048'576, 200}) {
      sources.push_back(random_bytes(length, random));
      targets.emplace_back(length);
      lengths.push_back(length);
      from.push_back(address(sources.back()));
      to.push_back(address(targets.back()));
    }
    kvtier::copy_pieces(pool, to, from, lengths, mode);
    check(targets == sources, "pieces by " + std::string(kvtier::copy_mode_name(mode)));
  }
}

}  // namespace

int main() {
  every_mode_moves_what_the_formula_says();
  a_request_that_does_not_fit_is_refused();
  units_are_each_done_once_whoever_calls();
  pieces_of_any_length_are_copied();
  return 0;
}
