"""Faults to plant into the kernels that compute: each barrier, exchange, bound and rounding once.

Not here is what changes no byte: a pair of parameters is stored by every thread that has it.
"""

from __future__ import annotations

from mutations import Fault


def _hot(before: str, after: str) -> Fault:
    return Fault("hot.cu", before, after, "hot_steps")


def _rows(before: str, after: str) -> Fault:
    return Fault("hot.cu", before, after, "hot_rows")


def _rope(before: str, after: str) -> Fault:
    return Fault("rope.cu", before, after, "rope")


def _quantise(file: str, before: str, after: str) -> Fault:
    return Fault(file, before, after, "quantise")


_BARRIER = "  __syncthreads();\n"

FAULTS = [
    # hot.cu: barriers
    _hot("= kIsSlot - 1;\n  }\n" + _BARRIER, "= kIsSlot - 1;\n  }\n"),
    _hot(
        "atomicMin(&table.values[table.insert(token)], i);\n    }\n  }\n" + _BARRIER,
        "atomicMin(&table.values[table.insert(token)], i);\n    }\n  }\n",
    ),
    _hot("__popc(unused_lanes));\n    }\n  " + _BARRIER, "__popc(unused_lanes));\n    }\n"),
    _hot("__syncthreads();  // counts are read before they are written anew", ""),
    _hot(
        "counts[warp] = static_cast<std::uint32_t>(__popc(lanes));\n  " + _BARRIER,
        "counts[warp] = static_cast<std::uint32_t>(__popc(lanes));\n",
    ),
    _hot("__syncthreads();  // as above; and all values are slots after the last round", ""),
    # hot.cu: atomics, bounds, order
    _hot("if (held == kNoToken || held == token) return place;", "return place;"),
    _hot(
        "atomicMin(&table.values[table.insert(token)], i);",
        "table.values[table.insert(token)] = i;",
    ),
    _hot(
        "place &= size - 1;\n      const std::int32_t held = tokens[place];",
        "const std::int32_t held = tokens[place];",
    ),
    _hot("if (i < warp) before += count;", "if (i <= warp) before += count;"),
    _hot("(1u << threadIdx.x % 32) - 1", "(2u << threadIdx.x % 32) - 1"),
    _hot("if (token >= 0) place = table.find(token);", "place = table.find(token);"),
    _hot("table.values[i] = kIsSlot - 1;", "table.values[i] = 0;"),
    _hot(
        "__ballot_sync(kAllLanes, i < capacity && !is_found)", "__ballot_sync(kAllLanes, !is_found)"
    ),
    _hot("} else if (i < capacity) {", "} else {"),
    _hot("sorted[capacity - 1 - found.before]", "sorted[capacity - found.before]"),
    _hot("i < untouched    ? sorted[missing.all + i]", "i < untouched    ? sorted[i]"),
    _hot("sorted[i - untouched]", "sorted[unused.all - 1 - (i - untouched)]"),
    _hot("sorted[capacity - 1 - (i - unused.all)]", "sorted[i]"),
    _hot(
        "if (thread == 0) arguments.missing_counts",
        "if (thread == 0 && missing.all) arguments.missing_counts",
    ),
    _rows("if (part >= arguments.part_count) continue;", ""),
    _rows(
        "next -= count;",
        "next = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;\n    if (request == 1) break;",
    ),
    Fault("hot.cu", "vector < vectors ? vector : base", "vector", "hot_rows", is_sanitized=True),
    _rows("if (base + 32 * i < vectors) to[", "to["),
    _rows(
        "base < vectors; base += 32 * kRowVectorsInFlight",
        "base < vectors && base < 128; base += 32 * kRowVectorsInFlight",
    ),
    # rope.cu
    _rope(
        "turned = subtract(multiply(x, cosine), multiply(y, sine))",
        "turned = fused(x, cosine, -multiply(y, sine))",
    ),
    _rope(
        "y = add(multiply(y, cosine), multiply(x, sine));\n  x = turned;",
        "x = turned;\n  y = add(multiply(y, cosine), multiply(x, sine));",
    ),
    _rope(
        "place.inside[i] = octets[i] < arguments.run_elements / kOctet;", "place.inside[i] = true;"
    ),
    _rope("pieces[i].inside[j] = pieces[i].inside[j] && inside;", "(void)inside;"),
    _rope("arguments.page_units == nullptr ? 0 : arguments.page_units[page]", "0"),
    _rope("is_split ? piece + rotated", "is_split ? piece + rotated / 2"),
    _rope("arguments.is_from_stored ? pieces[i].stored[j]", "false ? pieces[i].stored[j]"),
    _rope("float (&half)[kOctet] = j < 2 ? a : b;", "float (&half)[kOctet] = j < 1 ? a : b;"),
    _rope("first += step * kPiecesInFlight", "first += step"),
    _rope("row * arguments.row_stride + col", "col"),
    _rope("col * arguments.col_stride;", "col * 32;"),
    _rope("arguments.planes[plane]", "arguments.planes[0]"),
    _rope("plane * arguments.stored_plane_stride", "0"),
    _rope("row * arguments.stored_row_stride", "row * arguments.stored_col_stride"),
    _rope("col * arguments.stored_col_stride", "col"),
    _rope("(unit) * (arguments.rotary_elements / 2)", "(unit) * arguments.rotary_elements"),
    _rope("pieces[i].units != nullptr && pieces[i].inside[0]", "pieces[i].inside[0]"),
    _rope("const bool is_rotated = piece < rotated;", "const bool is_rotated = true;"),
    # quantise.h
    _quantise("quantise.h", "if (zero == 0x8000u) zero = 0;", ""),
    _quantise("quantise.h", "range.low > range.high;", "false;"),
    _quantise("quantise.h", "span > 0.0f ? half_bits", "true ? half_bits"),
    _quantise("quantise.h", "parameters.scale > 0.0f ? reciprocal", "true ? reciprocal"),
    _quantise("quantise.h", "lesser(greater(place, 0.0f), largest_code)", "greater(place, 0.0f)"),
    _quantise(
        "quantise.h", "lesser(greater(place, 0.0f), largest_code)", "lesser(place, largest_code)"
    ),
    _quantise("quantise.h", "greater(lesser(range.low, kLargestHalf), -kLargestHalf)", "range.low"),
    _quantise(
        "quantise.h", "greater(lesser(range.high, kLargestHalf), -kLargestHalf)", "range.high"
    ),
    _quantise(
        "quantise.h",
        "kLargestHalf);\n}\n\ntemplate <int kBits>",
        "1e30f);\n}\n\ntemplate <int kBits>",
    ),
    _quantise(
        "quantise.h",
        "left < arguments.group_rows ? left : arguments.group_rows",
        "arguments.group_rows",
    ),
    Fault("quantise.h", "    if (row < row_count) {\n", "    {\n", "quantise", is_sanitized=True),
    _quantise("quantise.h", "row * arguments.row_stride +", "row +"),
    _quantise("quantise.h", "(place.col) * arguments.col_stride", "(place.col) * 16"),
    _quantise("quantise.h", "place.plane * arguments.stored_plane_stride", "0"),
    _quantise("quantise.h", "arguments.planes[place.plane]", "arguments.planes[0]"),
    _quantise("quantise.h", "arguments.pages[page]", "arguments.pages[0]"),
    _quantise("quantise.h", "(row) * arguments.cols + place.col", "(row) + place.col"),
    _quantise("quantise.h", "(place.line) * arguments.cols + place.col", "(place.line)"),
    _quantise("quantise.h", "(place.line) * line_rows", "(place.line)"),
    # quantise.cu
    _quantise(
        "quantise.cu",
        "row * arguments.row_stride), octet);",
        "first * arguments.row_stride), octet);",
    ),
    _quantise(
        "quantise.cu",
        "if (row >= row_count) break;\n        float values[kOctet];\n        unpack",
        "float values[kOctet];\n        unpack",
    ),
    _quantise(
        "quantise.cu",
        "if (row >= row_count) break;\n        float values[kOctet];\n        KVTIER_UNROLL",
        "float values[kOctet];\n        KVTIER_UNROLL",
    ),
    _quantise("quantise.cu", "if (first + static_cast<std::uint32_t>(i) >= row_count) break;", ""),
    _quantise(
        "quantise.cu",
        "distance = 1u << arguments.group_shift; distance >>= 1;",
        "distance = 1u << arguments.group_shift; (distance >>= 1) > 1;",
    ),
    _quantise("quantise.cu", "range.high = greater(range.high, high);", ""),
    _quantise(
        "quantise.cu",
        "if (!inside[i]) continue;\n      const std::uint32_t pair",
        "const std::uint32_t pair",
    ),
    _quantise(
        "quantise.cu",
        "arguments.group_shift) - 1)) == 0) {",
        "arguments.group_shift) - 1)) == 1) {",
    ),
    _quantise("quantise.cu", "if (row_count > kHeld) load_rows", "if (false) load_rows"),
    _quantise(
        "quantise.cu",
        "if (!inside[i]) continue;\n      const Parameters parameters",
        "const Parameters parameters",
    ),
    # boosted.cu
    _quantise(
        "boosted.cu",
        "head < heads_of_warp && place.octet.col < arguments.cols",
        "head < heads_of_warp",
    ),
    _quantise(
        "boosted.cu",
        "head < heads_of_warp && place.octet.col < arguments.cols",
        "place.octet.col < arguments.cols",
    ),
    _quantise(
        "boosted.cu",
        "place.is_active && place.octet.octet < arguments.boosted / 4",
        "place.is_active",
    ),
    _quantise(
        "boosted.cu", "__shfl_sync(0xffffffffu, boosts, static_cast<int>(lanes[k]))", "boosts"
    ),
    _quantise("boosted.cu", "__shfl_sync(0xffffffffu, bytes[i], lane)", "bytes[i]"),
    _quantise(
        "boosted.cu",
        "for (std::uint32_t k = 0; k < 3; ++k)",
        "for (std::uint32_t k = 0; k < 2; ++k)",
    ),
    _quantise("boosted.cu", "window >>= is_boosted ? 2 : 0;", "window >>= 2;"),
    _quantise("boosted.cu", "if (row_count > kHeld) load_rows", "if (false) load_rows"),
]
