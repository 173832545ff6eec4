"""Faults to plant into the copy kernels: each address, bound, wait, fence and commit once.

Not here is what changes no byte: a vector past the end is stored as the last one again, or a tile is
copied twice.
"""

from __future__ import annotations

from mutations import Fault


def _place(before: str, after: str, check: str = "copies") -> Fault:
    return Fault("locate.h", before, after, check)


def _far(before: str, after: str) -> Fault:
    return Fault("locate.h", before, after, "far")


def _copy(before: str, after: str, check: str = "copies") -> Fault:
    return Fault("copy.cu", before, after, check)


def _bulk(before: str, after: str, check: str = "bulk_copies") -> Fault:
    return Fault("bulk.cu", before, after, check)


_COPY_FAULTS = [
    # types.h: division
    Fault("types.h", "if (divisor == 1) return n;", "", "copies"),
    Fault("types.h", "multiplier) >> 32) >> shift", "multiplier) >> 32)", "copies"),
    # locate.h: which part it is
    _place("arguments.vectors.quotient(index)", "arguments.cols.quotient(index)"),
    _place("arguments.cols.quotient(run)", "arguments.rows.quotient(run)"),
    _place("arguments.rows.quotient(row_index)", "arguments.cols.quotient(row_index)"),
    _place("arguments.plane_count.quotient(plane_index)", "arguments.rows.quotient(plane_index)"),
    _place("index - run * arguments.vectors.divisor", "index"),
    _place("* vector_bytes;", "* 16;"),
    _place("run - row_index * arguments.cols.divisor", "run"),
    _place("row_index - plane_index * arguments.rows.divisor", "row_index"),
    _place("plane_index - page * arguments.plane_count.divisor", "plane_index"),
    _place("arguments.pages[page]", "arguments.pages[0]"),
    # locate.h: where it lies
    _place("entry.paged_offset + row", "row"),
    _place(
        "row * arguments.row_stride + col * arguments.col_stride + x",
        "col * arguments.row_stride + row * arguments.col_stride + x",
    ),
    _place("row * arguments.row_stride + col", "col"),
    _place("col * arguments.col_stride + x", "x"),
    _place("arguments.col_stride + x;", "arguments.col_stride;"),
    _place(
        "static_cast<std::int64_t>(plane) * arguments.stored_plane_stride +",
        "",
    ),
    _place("arguments.stored_plane_stride", "arguments.stored_row_stride"),
    _place("row * arguments.stored_row_stride", "row * arguments.row_stride"),
    _place("col * arguments.stored_col_stride", "col * arguments.col_stride"),
    _place("arguments.stored_col_stride + x;", "arguments.stored_col_stride;"),
    _place("arguments.planes[plane]", "arguments.planes[0]"),
    _place("entry.stored_address +", "arguments.pages[0].stored_address +"),
    # locate.h: offsets of 64 bits with a sign
    _place("row * arguments.row_stride", "static_cast<std::uint32_t>(row * arguments.row_stride)"),
    _place("col * arguments.col_stride", "static_cast<std::uint32_t>(col * arguments.col_stride)"),
    _far("entry.paged_offset + row", "static_cast<std::int32_t>(entry.paged_offset) + row"),
    _far("row * arguments.row_stride", "static_cast<std::int32_t>(row * arguments.row_stride)"),
    _far("col * arguments.col_stride", "static_cast<std::int32_t>(col * arguments.col_stride)"),
    _far(
        "static_cast<std::int64_t>(plane) * arguments.stored_plane_stride",
        "plane * static_cast<std::uint32_t>(arguments.stored_plane_stride)",
    ),
    _far(
        "row * arguments.stored_row_stride",
        "static_cast<std::uint32_t>(row * arguments.stored_row_stride)",
    ),
    _far(
        "col * arguments.stored_col_stride",
        "static_cast<std::uint32_t>(col * arguments.stored_col_stride)",
    ),
    _far("static_cast<std::uint64_t>(paged)", "static_cast<std::uint32_t>(paged)"),
    _far("static_cast<std::uint64_t>(stored)", "static_cast<std::uint32_t>(stored)"),
    # copy.cu
    _copy("using Value = Vector<kVectorBytes>;", "using Value = Vector16;"),
    _copy("using Value = Vector<kVectorBytes>;", "using Value = Vector<1>;"),
    _copy("copy<kBytes, true>(arguments)", "copy<16, true>(arguments)"),
    _copy("copy<kBytes, false>(arguments)", "copy<16, false>(arguments)"),
    _copy("(blockDim.x) * kVectorsInFlight;", "(blockDim.x) * kVectorsInFlight + 1;"),
    _copy("first = blockIdx.x * tile", "first = 0"),
    _copy("first += gridDim.x * tile", "first += 2 * gridDim.x * tile"),
    _copy("for (std::uint64_t first", "for (std::uint32_t first", "large_grid"),
    _copy("static_cast<std::uint64_t>(i) * blockDim.x + threadIdx.x", "threadIdx.x"),
    _copy("* blockDim.x + threadIdx.x", "* blockDim.x"),
    _copy("inside[i] = index < arguments.total", "inside[i] = index <= arguments.total"),
    _copy("inside[i] = index < arguments.total", "inside[i] = index + 1 < arguments.total"),
    _copy("inside[i] = index < arguments.total", "inside[i] = true"),
    _copy("first < arguments.total;", "first + 1 < arguments.total;", "large_grid"),
    _copy(
        "inside[i] ? static_cast<std::uint32_t>(index) : arguments.total - 1",
        "static_cast<std::uint32_t>(index)",
    ),
    _copy("kGather ? places[i].paged : places[i].stored", "places[i].paged"),
    _copy("kGather ? places[i].stored : places[i].paged", "places[i].stored"),
]

_BULK_FAULTS = [
    # bulk.cu: waits, fences, arrivals, groups
    _bulk("  fence_async();\n", ""),
    _bulk("    barrier_wait(barriers + slot, piece / kBulkSlots % 2);\n", ""),
    _bulk("piece / kBulkSlots % 2", "0"),
    _bulk("piece / kBulkSlots % 2", "1"),
    _bulk("    bulk_commit();\n", ""),
    _bulk("bulk_wait_read<1>();", ""),
    _bulk("bulk_wait_read<1>();", "bulk_wait_read<2>();"),
    _bulk("bulk_wait_read<0>();", ""),
    _bulk("bulk_wait_read<0>();", "bulk_wait_read<1>();"),
    _bulk("    barrier_arrive_expect(barriers + slot, nbytes);\n", ""),
    _bulk(
        "barrier_arrive_expect(barriers + slot, nbytes)", "barrier_arrive_expect(barriers, nbytes)"
    ),
    _bulk(
        "barrier_arrive_expect(barriers + slot, nbytes)",
        "barrier_arrive_expect(barriers + slot, slot_bytes)",
    ),
    _bulk("nbytes, barriers + slot);", "nbytes, barriers);"),
    _bulk("barrier_init(barriers + slot, 1)", "barrier_init(barriers + slot, 2)"),
    _bulk("slot < kBulkSlots; ++slot", "slot < kBulkSlots - 1; ++slot"),
    # bulk.cu: slots and rings
    _bulk("if (threadIdx.x % 32 != 0) return;", ""),
    _bulk("if (blockDim.x % 32 != 0) stop();", "", "bulk_refusals"),
    _bulk("if (slot_bytes == 0) stop();", "", "bulk_refusals"),
    _bulk("(shared) + ring * kBulkSlots;", "(shared);"),
    _bulk("shared + bulk_barriers_bytes(rings) + ring", "shared + ring"),
    _bulk(
        "bulk_barriers_bytes(rings) + ring * kBulkSlots * slot_bytes", "bulk_barriers_bytes(rings)"
    ),
    _bulk("bulk_load(slots + slot * slot_bytes", "bulk_load(slots"),
    _bulk("slots + slot * slot_bytes,\n               storing", "slots,\n               storing"),
    _bulk("piece < kBulkSlots - 1 && loading.more()", "piece < kBulkSlots && loading.more()"),
    _bulk("piece < kBulkSlots - 1 && loading.more()", "piece < kBulkSlots - 1"),
    _bulk("load_next(piece + kBulkSlots - 1)", "load_next(piece + kBulkSlots)"),
    _bulk("    if (loading.more()) {\n", "    {\n"),
    # bulk.cu: runs and pieces
    Fault("bulk.cu", "    if (!more()) return;\n", "", "bulk_copies", is_sanitized=True),
    _bulk("return left < slot_bytes ? left : slot_bytes;", "return slot_bytes;"),
    _bulk("return left < slot_bytes ? left : slot_bytes;", "return left;"),
    _bulk("left = arguments.run_bytes;", "left = slot_bytes;"),
    _bulk("run < arguments.total", "run + 1 < arguments.total"),
    _bulk("run < arguments.total", "run <= arguments.total"),
    _bulk("    place.paged += piece;\n", ""),
    _bulk("    place.stored += piece;\n", ""),
    _bulk("    left -= piece;\n", "    left = 0;\n"),
    _bulk("run += step;", "run += step + 1;"),
    _bulk("      begin_run();\n    }", "    }"),
    _bulk("gridDim.x * rings;", "gridDim.x * rings + 1;"),
    _bulk("(blockIdx.x) * rings + ring", "(blockIdx.x) * rings"),
    _bulk("(blockIdx.x) * rings + ring", "(blockIdx.x) + ring"),
    _bulk("kGather ? loading.place.paged : loading.place.stored", "loading.place.paged"),
    _bulk("kGather ? storing.place.stored : storing.place.paged", "storing.place.stored"),
    _bulk("  loading.next();\n", ""),
    # bulk_shape.h
    Fault("bulk_shape.h", "(shared_bytes - barriers) /", "shared_bytes /", "bulk_copies"),
    Fault(
        "bulk_shape.h",
        "/ (rings * kBulkSlots) / kBulkSlotUnit * kBulkSlotUnit",
        "/ (rings * kBulkSlots)",
        "bulk_copies",
    ),
    Fault("bulk_shape.h", "if (shared_bytes < barriers) return 0;", "", "bulk_refusals"),
]

FAULTS = _COPY_FAULTS + _BULK_FAULTS
