"""The hot buffer on a CUDA device: the KV of a step's most needed tokens, fetched where it is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.backends.cuda_arguments import FastDiv, HotArgs, HotCopyArgs
from kvtier.backends.cuda_launcher import Launcher
from kvtier.backends.cuda_launches import (
    Launch,
    hot_copy_launch,
    hot_resolve_launch,
    hot_table_size,
)
from kvtier.backends.cuda_memory import Memory, check_apart, extent_of, reach

if TYPE_CHECKING:
    from kvtier._core import DeviceJob

_CAPACITY_MAX = 65_535  # slots are numbered in 16 bits
_TOKEN_END_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class HotPlan:
    """What `hot_resolve` writes and `hot_copy` reads, int32 on the device.

    [request, top] each, `missing_counts` [request]; the first `missing_counts[r]` of a request's
    missing tokens and slots are written.
    """

    top_slots: Memory
    missing_tokens: Memory
    missing_slots: Memory
    missing_counts: Memory


@dataclass(frozen=True, slots=True, eq=False)
class HotSources:
    """Where the rows of all tokens lie; checked once, by `CudaKernels.hot_sources`."""

    parts: npt.NDArray[np.uint64]
    """[request, part] addresses that kernels see; every part of a request has `part_tokens` tokens."""
    part_tokens: int
    part_bytes: int


class HotKernels(Launcher):
    """Resolves and fetches. Any thread."""

    def hot_resolve(
        self,
        top_tokens: Memory,
        slot_tokens: Memory,
        order: Memory,
        plan: HotPlan,
        *,
        shape: tuple[int, int],
        capacity: int,
        token_end: int,
        after: int | None = None,
    ) -> DeviceJob:
        """Give the tokens that a step attends to slots of the hot buffer, and say which are missing.

        `top_tokens` is int32 of `shape` [request, top]; `slot_tokens` int32 and `order` uint16
        [request, capacity] are the buffer's state, at first -1 and 0, 1, ... for each request; see
        `csrc/cuda/hot_args.h` for what becomes of them. Tokens outside 0 up to `token_end` get -1.

        Raises:
            ValueError: nothing was launched.
            OSError: the device failed.
        """
        requests, top = shape
        if not 1 <= top <= capacity <= _CAPACITY_MAX:
            raise ValueError(
                f"{top} tokens a step in {capacity} slots: at least one, at most as many as slots, "
                f"of which {_CAPACITY_MAX} are possible"
            )
        if requests < 1 or not 0 < token_end <= _TOKEN_END_MAX:
            raise ValueError(f"{requests} requests, tokens up to {token_end}")
        state = (requests, capacity)
        wanted: list[tuple[str, Memory, str, tuple[int, ...], bool]] = [
            ("top_tokens", top_tokens, "int32", shape, False),
            ("slot_tokens", slot_tokens, "int32", state, True),
            ("order", order, "uint16", state, True),
            ("top_slots", plan.top_slots, "int32", shape, True),
            ("missing_tokens", plan.missing_tokens, "int32", shape, True),
            ("missing_slots", plan.missing_slots, "int32", shape, True),
            ("missing_counts", plan.missing_counts, "int32", (requests,), True),
        ]
        extents = [
            extent_of(self._device, name, memory, dtype=dtype, shape=size, is_target=is_target)
            for name, memory, dtype, size, is_target in wanted
        ]
        ranges = [(each.name, each.address, each.nbytes) for each in extents]
        for index, each in enumerate(ranges):
            check_apart([each], ranges[index + 1 :])
        arguments = HotArgs(
            *[each.address for each in extents], top, capacity, hot_table_size(top), token_end
        )
        launch = hot_resolve_launch(arguments, requests)
        return self._launch([], lambda _: launch, after, 0)

    def hot_sources(
        self, parts: npt.NDArray[np.uint64], part_tokens: int, part_bytes: int
    ) -> HotSources:
        """Check where the host has the rows of all tokens: token t in part ``t // part_tokens``.

        Raises:
            ValueError: a part is no memory that the device reaches.
        """
        if parts.ndim != 2 or not parts.size or parts.dtype != np.uint64:
            raise ValueError(
                f"parts of {parts.dtype} {parts.shape}, expected uint64 [request, part]"
            )
        if not 0 < part_tokens <= _TOKEN_END_MAX or part_bytes < 1:
            raise ValueError(f"parts of {part_tokens} tokens and {part_bytes} bytes")
        once, which = np.unique(parts, return_inverse=True)
        seen = [
            reach(self._device, f"the part at {address:#x}", address, part_bytes)
            for address in once.tolist()
        ]
        addresses = np.array(seen, np.uint64)[which].reshape(parts.shape)
        return HotSources(addresses, part_tokens, part_bytes)

    def hot_copy(
        self,
        plan: HotPlan,
        sources: HotSources,
        target: Memory,
        *,
        shape: tuple[int, int],
        capacity: int,
        row_bytes: int,
        source_offset: int = 0,
        source_stride: int = 0,
        target_stride: int = 0,
        after: int | None = None,
        blocks: int = 0,
    ) -> DeviceJob:
        """Fetch the rows that a plan found missing, of one layer's K, V or latent.

        A part's rows begin at `source_offset`, `source_stride` bytes apart; `target` is [request,
        slot, row] with rows `target_stride` apart; 0 for strides: rows follow each other. The same
        plan serves every layer. `shape` and `capacity` as for `hot_resolve`, whose job must be
        before `after` or on the same `CudaKernels`.

        Raises:
            ValueError: nothing was launched.
            OSError: the device failed.
        """
        requests, top = shape
        source_stride, target_stride = source_stride or row_bytes, target_stride or row_bytes
        if row_bytes < 1 or source_offset < 0 or min(source_stride, target_stride) < row_bytes:
            raise ValueError(
                f"rows of {row_bytes} bytes, {source_stride} and {target_stride} apart from "
                f"{source_offset} on"
            )
        if len(sources.parts) != requests:
            raise ValueError(f"sources of {len(sources.parts)} requests, expected {requests}")
        last = source_offset + (sources.part_tokens - 1) * source_stride + row_bytes
        if last > sources.part_bytes:
            raise ValueError(
                f"rows up to {last} bytes of parts that have {sources.part_bytes} bytes"
            )
        inputs = [
            extent_of(self._device, name, memory, dtype="int32", shape=size)
            for name, memory, size in (
                ("missing_tokens", plan.missing_tokens, shape),
                ("missing_slots", plan.missing_slots, shape),
                ("missing_counts", plan.missing_counts, (requests,)),
            )
        ]
        whole = extent_of(self._device, "target", target, is_target=True)
        whole.require((requests * capacity - 1) * target_stride + row_bytes, 4)
        taken = [("target", whole.address, whole.nbytes)]
        check_apart([(each.name, each.address, each.nbytes) for each in inputs], taken)
        parts = np.unique(sources.parts).tolist()
        check_apart([(f"the part at {at:#x}", at, sources.part_bytes) for at in parts], taken)
        numbers = [whole.address, row_bytes, source_offset, source_stride, target_stride, *parts]
        vector = next((size for size in (16, 8, 4) if not any(n % size for n in numbers)), 0)
        if not vector:
            raise ValueError("rows, strides and addresses have to be multiples of 4 bytes")

        def launch_of(table_addresses: list[int]) -> Launch:
            arguments = HotCopyArgs(
                table_addresses[0],
                *[each.address for each in inputs],
                whole.address,
                source_offset,
                source_stride,
                target_stride,
                capacity * target_stride,
                row_bytes,
                requests,
                top,
                sources.parts.shape[1],
                FastDiv(sources.part_tokens),
            )
            return hot_copy_launch(arguments, vector)

        return self._launch([sources.parts], launch_of, after, blocks)
