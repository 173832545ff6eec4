"""Faults to plant into the kernels that compute: each barrier, exchange, bound and rounding once.

Each is a file of `csrc/cuda`, words that stand in it once, and what stands there in their place; and
the test module that has to fail.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change of the source."""

    file: str
    before: str
    after: str
    tests: str


def _hot(before: str, after: str) -> Fault:
    return Fault("hot.cu", before, after, "test_hot.py")


def _rope(before: str, after: str) -> Fault:
    return Fault("rope.cu", before, after, "test_rope.py")


def _quantise(file: str, before: str, after: str) -> Fault:
    return Fault(file, before, after, "test_quantise.py")


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
    _hot(
        "const std::int32_t held = atomicCAS(&tokens[place], kNoToken, token);",
        "const std::int32_t held = tokens[place];\n"
        "      if (held == kNoToken) tokens[place] = token;",
    ),
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
    _hot(
        "for (std::uint32_t i = thread; i < table.size; i += threads)",
        "for (std::uint32_t i = thread; i < table.size - 1; i += threads)",
    ),
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
    _hot("if (part >= arguments.part_count) continue;", ""),
    _hot(
        "next -= count;",
        "next = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;\n    if (request == 1) break;",
    ),
    _hot("vector < vectors ? vector : base", "vector"),
    _hot("if (base + 32 * i < vectors) to[", "to["),
    _hot(
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
    _rope("pieces[i].inside[j] = pieces[i].inside[j] && inside;", ""),
    _rope("arguments.page_units == nullptr ? 0 : arguments.page_units[page]", "0"),
    _rope("is_split ? piece + rotated", "is_split ? piece + rotated / 2"),
    _rope(
        "arguments.is_from_stored ? pieces[i].stored[j] : pieces[i].paged[j]", "pieces[i].paged[j]"
    ),
    _rope("float(&half)[kOctet] = j < 2 ? a : b;", "float(&half)[kOctet] = j < 1 ? a : b;"),
    _rope("first += step * kPiecesInFlight", "first += step"),
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
    _quantise("quantise.h", "    if (row < row_count) {\n", "    {\n"),
    # quantise.cu
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
        "quantise.cu", "if ((places[i].octet & ((1u << arguments.group_shift) - 1)) == 0) {", "{"
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
