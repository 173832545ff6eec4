#include "device_copy.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "../cuda/bulk_shape.h"
#include "../cuda/types.h"
#include "device_kernels.hpp"
#include "device_staging.hpp"

namespace kvtier::device {
namespace {

constexpr unsigned kThreads = 512;
constexpr std::uint64_t kTileVectors = kThreads * 4;  // what a CTA has in flight
constexpr unsigned kRings = 8;                        // of a CTA of the bulk kernels
constexpr std::uint32_t kRingSlotBytes[] = {4096, 2048, 1024};

/// A launch: some planes of some pages of a wave.
struct Part {
  std::size_t first_page;
  std::size_t page_count;
  std::uint64_t first_plane;
  std::uint64_t plane_count;
};

/// Parts of at most so many bytes, and of no more items than a launch has.
std::vector<Part> split(const WavePages& wave, std::uint64_t plane_bytes, std::uint64_t plane_items,
                        std::uint64_t bytes_max, std::uint64_t items_max) {
  std::vector<Part> parts;
  const std::uint64_t planes_max = std::min(bytes_max / plane_bytes, items_max / plane_items);
  if (planes_max == 0) {
    throw std::invalid_argument("a page of " + std::to_string(plane_bytes) +
                                " bytes in each plane is too large for a kernel here");
  }
  const std::uint64_t end_plane = wave.first_plane + wave.plane_count;
  for (std::uint64_t plane = wave.first_plane; plane < end_plane; plane += planes_max) {
    const std::uint64_t planes = std::min(planes_max, end_plane - plane);
    const std::uint64_t pages_max =
        std::min(bytes_max / (planes * plane_bytes), items_max / (planes * plane_items));
    for (std::size_t page = 0; page < wave.pages.size(); page += pages_max) {
      parts.push_back(
          {page, std::min<std::size_t>(pages_max, wave.pages.size() - page), plane, planes});
    }
  }
  return parts;
}

std::uint32_t ring_slot_bytes(const State& state) {
  for (const std::uint32_t bytes : kRingSlotBytes) {
    if (bulk_shared_bytes(kRings, bytes) <= static_cast<std::uint32_t>(state.shared_bytes_max)) {
      return bytes;
    }
  }
  throw std::invalid_argument("the device has too little shared memory for bulk copies");
}

FastDiv fast_div(std::uint64_t divisor) {
  return make_fast_div(static_cast<std::uint32_t>(divisor));
}

/// Everything of one copy that is enqueued.
class Enqueuing {
 public:
  Enqueuing(State& state, const KernelCopy& copy)
      : state_(state),
        copy_(copy),
        plane_bytes_(copy.geometry.plane_bytes()),
        vectors_(copy.is_bulk ? 1 : copy.geometry.run_bytes() / copy.vector_bytes),
        kernel_stream_(copy.is_gather ? state.out_kernels : state.into_kernels),
        engine_stream_(copy.is_gather ? state.out : state.into),
        name_(std::string(copy.is_bulk ? "kvtier_bulk_" : "kvtier_") +
              (copy.is_gather ? "gather" : "scatter") +
              (copy.is_bulk ? "" : "_v" + std::to_string(copy.vector_bytes))) {
    if (!state.kernels->has(name_)) {
      throw std::invalid_argument(
          "no kernel " + name_ + ": " +
          (state.kernels->missing().empty() ? "the device has no such" : state.kernels->missing()));
    }
    if (copy.is_bulk) slot_shared_bytes_ = bulk_shared_bytes(kRings, ring_slot_bytes(state));
    if (copy.is_staged) slots_ = &state.slots(copy.is_gather);
    const std::uint64_t bytes_max =
        slots_ != nullptr ? slots_->slot_bytes() : std::numeric_limits<std::uint64_t>::max();
    const std::uint64_t plane_items = vectors_ * copy.geometry.rows() * copy.geometry.cols();
    for (const WavePages& wave : copy.waves) {
      parts_.push_back(
          split(wave, plane_bytes_, plane_items, bytes_max, state.options.launch_items_max));
    }
  }

  std::span<const cuda::Stream> streams() const { return {streams_, copy_.is_staged ? 2u : 1u}; }

  void run(Work& work, Event& engine) {
    const auto& state = work.state;
    engine.record(copy_.engine);
    engine.wait_on(kernel_stream_);  // the driver keeps a destroyed event as long as it is awaited
    // Segments are ready: what fills the staging from them need not wait for the engine.
    const bool is_filling_first = copy_.is_staged && !copy_.is_gather;
    work.start->record(is_filling_first ? engine_stream_ : kernel_stream_);
    Tables::Buffer& table = write_table();
    state_.tables->upload(table, table_bytes_, kernel_stream_);
    entry_ = 0;
    for (std::size_t w = 0; w < parts_.size(); ++w) {
      for (const Part& part : parts_[w]) {
        if (copy_.is_staged) {
          stage(copy_.waves[w], part, table);
        } else {
          launch(part, table);
        }
        entry_ += part.page_count;
      }
      if (copy_.is_staged && copy_.is_gather) {  // pages are free before their bytes are in place
        work.pages.push_back(std::make_unique<Event>(state));
        work.pages.back()->record(kernel_stream_);
      }
      work.waves.push_back(std::make_unique<Event>(state));
      work.waves.back()->record(copy_.is_staged && copy_.is_gather ? engine_stream_
                                                                   : kernel_stream_);
    }
    state_.tables->give_back(table, kernel_stream_);
  }

 private:
  /// The planes, then an entry for each page of each part; stored addresses are those of slots
  /// where the copy is staged.
  Tables::Buffer& write_table() {
    const std::uint64_t planes = copy_.geometry.plane_count();
    entries_at_ = (planes * sizeof(std::uint64_t) + 15) / 16 * 16;
    std::size_t entry_count = 0;
    for (const auto& parts : parts_) {
      for (const Part& part : parts) entry_count += part.page_count;
    }
    table_bytes_ = entries_at_ + entry_count * sizeof(PageEntry);
    Tables::Buffer& table = state_.tables->take(table_bytes_);
    for (std::uint64_t plane = 0; plane < planes; ++plane) {
      const std::uint64_t address = copy_.geometry.plane_address(plane);
      std::memcpy(table.host + plane * sizeof(address), &address, sizeof(address));
    }
    std::byte* at = table.host + entries_at_;
    std::size_t part_number = 0;
    for (std::size_t w = 0; w < parts_.size(); ++w) {
      const WavePages& wave = copy_.waves[w];
      for (const Part& part : parts_[w]) {
        std::uint64_t slot = slots_ != nullptr ? slots_->peek(part_number++) : 0;
        const std::uint64_t skipped = (part.first_plane - wave.first_plane) * plane_bytes_;
        for (std::size_t i = 0; i < part.page_count; ++i, at += sizeof(PageEntry)) {
          const PagePlace& page = wave.pages[part.first_page + i];
          const PageEntry entry{page.paged_offset,
                                slots_ != nullptr ? slot : page.stored_address + skipped};
          slot += part.plane_count * plane_bytes_;
          std::memcpy(at, &entry, sizeof(entry));
        }
      }
    }
    return table;
  }

  /// Through a slot: kernel and copy engine, one after the other.
  void stage(const WavePages& wave, const Part& part, const Tables::Buffer& table) {
    const cuda::Stream first = copy_.is_gather ? kernel_stream_ : engine_stream_;
    const cuda::Stream second = copy_.is_gather ? engine_stream_ : kernel_stream_;
    const std::uint64_t address = slots_->peek(0);
    const std::size_t slot = slots_->take(first);
    if (copy_.is_gather) {
      launch(part, table);
    } else {
      move(wave, part, address, first);
    }
    slots_->hand_over(slot, first, second);
    if (copy_.is_gather) {
      move(wave, part, address, second);
    } else {
      launch(part, table);
    }
    slots_->give_back(slot, second);
  }

  /// Between a slot and the segments.
  void move(const WavePages& wave, const Part& part, std::uint64_t slot, cuda::Stream stream) {
    const std::uint64_t nbytes = part.plane_count * plane_bytes_;
    const std::uint64_t skipped = (part.first_plane - wave.first_plane) * plane_bytes_;
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < part.page_count; ++i, slot += nbytes) {
      const std::uint64_t stored = wave.pages[part.first_page + i].stored_address + skipped;
      append_piece(pieces,
                   copy_.is_gather ? Piece{stored, slot, nbytes} : Piece{slot, stored, nbytes});
    }
    // A slot is read after it was filled, which the stream's order says; a segment is ready now.
    state_.copy_batch(stream, pieces,
                      copy_.is_gather ? cuda::SourceOrder::kStream : cuda::SourceOrder::kAny);
  }

  void launch(const Part& part, const Tables::Buffer& table) {
    const CopyPlan& geometry = copy_.geometry;
    const std::uint64_t rows = geometry.rows();
    const std::uint64_t cols = geometry.cols();
    const std::uint64_t run_bytes = geometry.run_bytes();
    const std::uint64_t block_planes =  // of a page's block on the stored side
        part.page_count * part.plane_count * rows * cols * vectors_;
    const std::uint64_t planes_at = table.device + part.first_plane * sizeof(std::uint64_t);
    const std::uint64_t pages_at = table.device + entries_at_ + entry_ * sizeof(PageEntry);
    const CopyArgs arguments{
        .planes = reinterpret_cast<const std::uint64_t*>(planes_at),
        .pages = reinterpret_cast<const PageEntry*>(pages_at),
        .row_stride = static_cast<std::int64_t>(geometry.row_stride()),
        .col_stride = static_cast<std::int64_t>(geometry.col_stride()),
        .stored_plane_stride = static_cast<std::int64_t>(plane_bytes_),
        .stored_row_stride = static_cast<std::int64_t>(cols * run_bytes),
        .stored_col_stride = static_cast<std::int64_t>(run_bytes),
        .total = static_cast<std::uint32_t>(block_planes),
        .run_bytes = static_cast<std::uint32_t>(copy_.is_bulk ? run_bytes : 0),
        .vectors = fast_div(vectors_),
        .cols = fast_div(cols),
        .rows = fast_div(rows),
        .plane_count = fast_div(part.plane_count),
    };
    const std::uint64_t tile = copy_.is_bulk ? kRings : kTileVectors;
    const std::uint64_t tiles = (block_planes + tile - 1) / tile;
    const unsigned grid = static_cast<unsigned>(std::min<std::uint64_t>(tiles, copy_.ctas));
    state_.kernels->launch(name_, grid, copy_.is_bulk ? 32 * kRings : kThreads, slot_shared_bytes_,
                           std::as_bytes(std::span(&arguments, 1)), kernel_stream_);
  }

  State& state_;
  const KernelCopy& copy_;
  const std::uint64_t plane_bytes_;
  const std::uint64_t vectors_;  // of a run
  const cuda::Stream kernel_stream_;
  const cuda::Stream engine_stream_;  // of the copy engine
  const cuda::Stream streams_[2] = {kernel_stream_, engine_stream_};
  const std::string name_;
  unsigned slot_shared_bytes_ = 0;
  Slots* slots_ = nullptr;
  std::vector<std::vector<Part>> parts_;  // [wave]
  std::size_t entries_at_ = 0;            // in the table
  std::size_t table_bytes_ = 0;
  std::size_t entry_ = 0;  // of the next part's first page
};

}  // namespace

std::uint64_t vector_bytes_of(std::uint64_t joined) {
  return std::min<std::uint64_t>(16, joined == 0 ? 16 : joined & (~joined + 1));
}

std::uint64_t joined_strides(const CopyPlan& geometry) {
  std::uint64_t joined = geometry.run_bytes();
  if (geometry.page_count() > 1) joined |= geometry.page_stride();
  if (geometry.rows() > 1) joined |= geometry.row_stride();
  if (geometry.cols() > 1) joined |= geometry.col_stride();
  for (std::uint64_t p = 0; p < geometry.plane_count(); ++p) joined |= geometry.plane_address(p);
  return joined;
}

void append_piece(std::vector<Piece>& pieces, const Piece& piece) {
  if (!pieces.empty() && pieces.back().target + pieces.back().nbytes == piece.target &&
      pieces.back().source + pieces.back().nbytes == piece.source) {
    pieces.back().nbytes += piece.nbytes;
  } else {
    pieces.push_back(piece);
  }
}

std::shared_ptr<Work> enqueue_kernels(const std::shared_ptr<State>& state, const KernelCopy& copy) {
  state->check_alive();
  std::uint64_t nbytes = 0;
  for (const WavePages& wave : copy.waves) {
    nbytes += wave.pages.size() * wave.plane_count * copy.geometry.plane_bytes();
  }
  auto work = std::make_shared<Work>(state, nbytes);
  const std::lock_guard lock(state->enqueue_mutex);
  state->with_context([&] {
    Enqueuing enqueuing(*state, copy);
    try {
      work->start = std::make_unique<Event>(state);
      Event engine(state);
      enqueuing.run(*work, engine);
    } catch (...) {  // what was begun is over before anybody hears of it
      for (const cuda::Stream stream : enqueuing.streams()) {
        state->library.stream_synchronize(stream);
      }
      throw;
    }
  });
  return work;
}

}  // namespace kvtier::device
