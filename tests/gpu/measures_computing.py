"""Kernels that compute, against plain copies: quantise and dequantise, RoPE shift, hot buffer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from gpu_machine import host_view
from measures import Figures, layouts, plain, rate
from rig import PagedOnDevice, Rig, TimeBox, Work, device_s, take_turns

from kvtier._core import DeviceJob
from kvtier.backends.cuda_kernels import (
    Axis,
    CudaKernels,
    Element,
    HotPlan,
    KvPages,
    QuantForm,
    rope_units,
)
from kvtier.device import Paging

QUANTISE_GOAL = 0.50
"""Of a plain copy within the device of the bytes that are read."""
FORMS = {
    "int8 by token": QuantForm(8, Axis.TOKEN, 64),
    "int8 by channel": QuantForm(8, Axis.CHANNEL, 16),
    "int4 by token": QuantForm(4, Axis.TOKEN, 64),
    "int4 by channel": QuantForm(4, Axis.CHANNEL, 16),
    "int2 by channel, boosted": QuantForm(2, Axis.CHANNEL, 16, boosted=16),
}
HOT_ROW_BYTES = 1152
"""MLA's latent of one token."""


@contextmanager
def _kernels(rig: Rig) -> Iterator[CudaKernels]:
    kernels = CudaKernels(rig.device)
    try:
        yield kernels
    finally:
        kernels.close()


def _pages(kernels: CudaKernels, kv: PagedOnDevice) -> KvPages:
    plane = kv.paged.planes[0]
    pages, rows, cols, run_bytes = plane.shape
    page_stride, row_stride, col_stride, _ = plane.strides
    paging = Paging(
        np.array(kv.plane_addresses, np.uint64),
        pages,
        page_stride,
        rows,
        row_stride,
        cols,
        col_stride,
        run_bytes,
    )
    return kernels.pages(paging, Element.BFLOAT16)


def quantise(rig: Rig, box: TimeBox) -> Figures:
    """Every form there and back; `ratio` is int4's worse axis against a plain copy of what it reads."""
    layout, shape = layouts(rig)["page by layer"]
    kv = PagedOnDevice(rig, layout, shape, on_device=True)
    orders = [kv.page_ids(turn) for turn in range(4)]
    works: dict[str, Work] = {"plain": plain(rig, "d2d", kv.nbytes)}
    with _kernels(rig) as kernels:
        pages = _pages(kernels, kv)
        for name, form in FORMS.items():
            boosted = None
            if form.boosted:
                ranks = np.arange(form.boosted, dtype=np.uint8)
                dims = (len(kv.paged.planes), shape.heads, form.boosted)
                boosted = np.ascontiguousarray(np.broadcast_to(ranks, dims))
            for verb in ("quantise", "dequantise"):
                call: Callable[..., DeviceJob] = getattr(kernels, verb)
                stored = (kv.stored, kv.nbytes)
                works[f"{verb}, {name}"] = (
                    lambda turn, call=call, form=form, boosted=boosted, stored=stored: device_s(  # type: ignore[misc]
                        call(pages, orders[turn % 4], form, stored, boosted=boosted)
                    )
                )
        times = take_turns(works, rig.sizes.rounds, box)
    plain_s = times.pop("plain")
    int4 = [times[f"quantise, int4 by {axis}"] for axis in ("token", "channel")]
    return {
        "nbytes": kv.nbytes,
        "plain_gb_s": rate(kv.nbytes, plain_s),
        "payload_gb_s": {name: rate(kv.nbytes, seconds) for name, seconds in times.items()},
        "value_gb_s": rate(kv.nbytes, max(int4)),
        "ratio": round(plain_s / max(int4), 4),
    }


def rope(rig: Rig, box: TimeBox) -> Figures:
    """The shift in place of all planes, against a plain copy of as many bytes."""
    layout, shape = layouts(rig)["page by layer"]
    kv = PagedOnDevice(rig, layout, shape, on_device=True)
    orders = [kv.page_ids(turn) for turn in range(4)]
    pairs = shape.run_bytes // 4
    units = rope_units(10000.0 ** (-np.arange(pairs) / pairs), [83])
    works: dict[str, Work] = {"plain": plain(rig, "d2d", kv.nbytes)}
    with _kernels(rig) as kernels:
        pages = _pages(kernels, kv)
        for is_neox in (True, False):
            works["neox" if is_neox else "interleaved"] = lambda turn, is_neox=is_neox: device_s(  # type: ignore[misc]
                kernels.rope_shift(pages, orders[turn % 4], units, is_neox=is_neox)
            )
        times = take_turns(works, rig.sizes.rounds, box)
    rates = {name: rate(kv.nbytes, seconds) for name, seconds in times.items()}
    return {"nbytes": kv.nbytes, "payload_gb_s": rates}


def hot(rig: Rig, box: TimeBox) -> Figures:
    """Resolve a step of every request, then fetch the rows that are missing from host memory.

    Half of a step's tokens are there from the step before, as where attention moves slowly. `ratio`
    is the fetch against a plain copy of as many bytes.
    """
    requests, capacity = rig.sizes.hot_requests, rig.sizes.hot_capacity
    top, part_tokens, parts = capacity // 2, 64, max(1, capacity * 4 // 64)
    tokens, shape = part_tokens * parts, (requests, top)
    steps = [
        np.stack([rig.rng.permutation(tokens)[:top] for _ in range(requests)]).astype(np.int32)
        for _ in range(4)
    ]
    for before, step in itertools.pairwise(steps):
        step[:, : top // 2] = before[:, top // 2 : top // 2 * 2]
    part_bytes = part_tokens * HOT_ROW_BYTES
    host = rig.host(part_bytes * parts * requests)
    places = host + np.arange(requests * parts, dtype=np.int64) * part_bytes
    order = np.tile(np.arange(capacity, dtype=np.uint16), (requests, 1))
    ints = 4 * requests * top
    top_at = [(rig.upload(step), step.nbytes) for step in steps]
    slots = rig.upload(np.full((requests, capacity), -1, np.int32)), 4 * requests * capacity
    order_at = rig.upload(order), order.nbytes
    plan = HotPlan(
        (rig.memory(ints), ints),
        (rig.memory(ints), ints),
        (rig.memory(ints), ints),
        (rig.memory(4 * requests), 4 * requests),
    )
    target_bytes = requests * capacity * HOT_ROW_BYTES
    target = rig.memory(target_bytes), target_bytes
    fetched: list[int] = []
    with _kernels(rig) as kernels:
        sources = kernels.hot_sources(
            places.astype(np.uint64).reshape(requests, parts), part_tokens, part_bytes
        )

        def resolve(turn: int) -> float:
            return device_s(
                kernels.hot_resolve(
                    top_at[turn % 4],
                    slots,
                    order_at,
                    plan,
                    shape=shape,
                    capacity=capacity,
                    token_end=tokens,
                )
            )

        def fetch(turn: int) -> float:
            job = kernels.hot_copy(
                plan, sources, target, shape=shape, capacity=capacity, row_bytes=HOT_ROW_BYTES
            )
            seconds = device_s(job)
            counts = rig.read(plan.missing_counts[0], 4 * requests).view(np.int32)
            fetched.append(int(counts.sum()))
            return seconds / max(1, fetched[-1])

        resolved_s, row_s, fetched_rows = _steps(resolve, fetch, fetched, rig.sizes.rounds, box)
        _check_rows(rig, places, part_tokens, slots, target, requests, capacity)
    nbytes = fetched_rows * HOT_ROW_BYTES
    plain_s = take_turns(
        {"plain": plain(rig, "h2d", max(HOT_ROW_BYTES, nbytes))}, rig.sizes.rounds, box
    )["plain"]
    return {
        "requests": requests,
        "top_tokens": top,
        "resolve_us": round(resolved_s * 1e6, 2),
        "missing_rows": fetched_rows,
        "fetch_gb_s": rate(HOT_ROW_BYTES, row_s),
        "plain_gb_s": rate(nbytes, plain_s),
        "ratio": round(rate(HOT_ROW_BYTES, row_s) / rate(nbytes, plain_s), 4),
    }


def _steps(
    resolve: Work, fetch: Work, fetched: list[int], rounds: int, box: TimeBox
) -> tuple[float, float, int]:
    """Resolve and fetch in the order that a step has them, whichever round it is."""
    resolved: list[float] = []
    rows: list[float] = []

    def both(turn: int) -> float:
        resolved.append(resolve(turn))
        rows.append(fetch(turn))
        return resolved[-1]

    take_turns({"both": both}, rounds, box)
    half = len(rows) // 4  # the first fill an empty buffer
    median = np.median
    return float(median(resolved[half:])), float(median(rows[half:])), int(median(fetched[half:]))


def _check_rows(
    rig: Rig,
    places: np.ndarray[tuple[int], np.dtype[np.int64]],
    part_tokens: int,
    slots: tuple[int, int],
    target: tuple[int, int],
    requests: int,
    capacity: int,
) -> None:
    """Some of the slots hold what the host has for their tokens."""
    parts = places.reshape(requests, -1)
    tokens = rig.read(*slots).view(np.int32).reshape(requests, capacity)
    for request, slot in rig.rng.integers(0, (requests, capacity), (32, 2)).tolist():
        token = int(tokens[request, slot])
        if token < 0:
            continue
        at = int(parts[request, token // part_tokens]) + token % part_tokens * HOT_ROW_BYTES
        row = rig.read(target[0] + (request * capacity + slot) * HOT_ROW_BYTES, HOT_ROW_BYTES)
        if not np.array_equal(row, host_view(at, HOT_ROW_BYTES)):
            raise AssertionError(f"slot {slot} of request {request} has not token {token}'s row")
