"""Kernels that compute with KV on a CUDA device: quantise, dequantise, RoPE shift, hot buffer.

Every call checks all it is given, enqueues on a stream of its own after the stream it is told, and
returns a job at once. The caller keeps the memory it names until the job is done, and lets nobody
write what the job reads or touch what it writes; `job.order_after` puts other streams behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.backends.cuda_arguments import Element
from kvtier.backends.cuda_hot import HotKernels, HotPlan, HotSources
from kvtier.backends.cuda_launches import (
    OCTET,
    Axis,
    Launch,
    QuantForm,
    StoredStrides,
    Tables,
    boost_tables,
    quantise_launch,
    rope_launch,
)
from kvtier.backends.cuda_memory import Memory, check_apart, extent_of, reach
from kvtier.device import Paging

if TYPE_CHECKING:
    from kvtier._core import DeviceJob

__all__ = [
    "Axis",
    "CudaKernels",
    "Element",
    "HotPlan",
    "HotSources",
    "KvPages",
    "QuantForm",
    "rope_units",
]

_VECTOR_BYTES = 16
_PAGE_ENTRY = np.dtype([("paged_offset", "<i8"), ("stored_address", "<u8")])

PageIds = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class KvPages:
    """An engine's pages as the kernels take them; checked once, by `CudaKernels.pages`."""

    paging: Paging
    """With the addresses that kernels see."""
    element: Element
    extents: tuple[tuple[str, int, int], ...]
    """Of each plane: name, address, bytes."""

    @property
    def run_elements(self) -> int:
        """Elements of one token and head."""
        return self.paging.run_bytes // self.element.nbytes


def rope_units(
    inverse_frequencies: npt.NDArray[np.float64], differences: Sequence[int]
) -> npt.NDArray[np.float32]:
    """[difference, pair, 2]: cosine and sine of each rotation, from double precision."""
    angles = np.multiply.outer(np.asarray(differences, np.float64), inverse_frequencies)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


class CudaKernels(HotKernels):
    """All of them on one device. Any thread. `blocks` of a call is how many CTAs it may take, 0: all."""

    def pages(self, paging: Paging, element: Element) -> KvPages:
        """Check an engine's pages; `paging` keeps their memory.

        A run has to be one head's elements, so heads and tokens must not be joined.

        Raises:
            ValueError: they are not this device's memory, or not multiples of 16 bytes.
        """
        strides = {
            "page": (paging.page_stride, paging.page_count),
            "token": (paging.row_stride, paging.rows),
            "head": (paging.col_stride, paging.cols),
        }
        for name, (stride, count) in strides.items():
            if count < 1:
                raise ValueError(f"{count} {name}s")
            if count > 1 and (stride % _VECTOR_BYTES or stride == 0):
                raise ValueError(f"{stride} bytes from {name} to {name}, expected a multiple of 16")
        if paging.run_bytes < 1 or paging.run_bytes % (OCTET * element.nbytes):
            raise ValueError(
                f"runs of {paging.run_bytes} bytes, expected a multiple of {OCTET} elements"
            )
        spans = [stride * (count - 1) for stride, count in strides.values()]
        low = sum(min(span, 0) for span in spans)
        nbytes = sum(abs(span) for span in spans) + paging.run_bytes
        extents, addresses = [], []
        for plane, address in enumerate(paging.plane_addresses.tolist()):
            name = f"plane {plane}"
            if address % _VECTOR_BYTES:
                raise ValueError(f"{name} at {address:#x} is not a multiple of 16 bytes")
            begin = reach(self._device, name, address + low, nbytes)
            extents.append((name, begin, nbytes))
            addresses.append(begin - low)
        seen = replace(paging, plane_addresses=np.array(addresses, np.uint64))
        return KvPages(seen, element, tuple(extents))

    def quantise(
        self,
        kv: KvPages,
        page_ids: PageIds,
        form: QuantForm,
        stored: Memory,
        *,
        planes: tuple[int, int] | None = None,
        boosted: npt.NDArray[np.uint8] | None = None,
        after: int | None = None,
        blocks: int = 0,
    ) -> DeviceJob:
        """Gather pages, quantised, into `stored`: [page, plane, tile], `form.tile(...)` bytes each.

        `planes` are the first plane and their count, by default all. `boosted` are, with a form that
        boosts, the boosted channels [plane, head, rank], ascending.

        Raises:
            ValueError: nothing was launched.
            OSError: the device failed.
        """
        return self._requantise(
            "quantise", kv, page_ids, form, stored, planes, boosted, after, blocks
        )

    def dequantise(
        self,
        kv: KvPages,
        page_ids: PageIds,
        form: QuantForm,
        stored: Memory,
        *,
        planes: tuple[int, int] | None = None,
        boosted: npt.NDArray[np.uint8] | None = None,
        after: int | None = None,
        blocks: int = 0,
    ) -> DeviceJob:
        """Scatter what `quantise` wrote to pages, each at most once. As `quantise` otherwise."""
        _check_distinct(page_ids)
        return self._requantise(
            "dequantise", kv, page_ids, form, stored, planes, boosted, after, blocks
        )

    def rope_shift(
        self,
        kv: KvPages,
        page_ids: PageIds,
        units: npt.NDArray[np.float32],
        *,
        is_neox: bool,
        unit_of_page: Sequence[int] | None = None,
        stored: Memory | None = None,
        planes: tuple[int, int] | None = None,
        after: int | None = None,
        blocks: int = 0,
    ) -> DeviceJob:
        """Rotate K by differences of positions, in place, or from `stored` to pages.

        `units` are [unit, pair, 2] as `rope_units` makes them, twice as many elements of a head are
        rotated as there are pairs; `unit_of_page` says which unit a page has, by default the first.
        `planes` must be those that hold K. `stored` is [page, plane, token, head, element].

        Raises:
            ValueError: nothing was launched.
            OSError: the device failed.
        """
        ids = _page_ids(kv, page_ids)
        _check_distinct(page_ids)
        first, count = _planes(kv, planes)
        if units.dtype != np.float32 or units.ndim != 3 or units.shape[2] != 2 or not len(units):
            raise ValueError(
                f"units of {units.dtype} {units.shape}, expected float32 [unit, pair, 2]"
            )
        rotary = 2 * units.shape[1]
        if rotary % (2 * OCTET) or not 0 < rotary <= kv.run_elements:
            raise ValueError(
                f"{rotary} rotated elements of {kv.run_elements}, expected a multiple of 16"
            )
        which = np.zeros(0, np.uint32)
        if unit_of_page is not None:
            given = np.asarray(unit_of_page, np.int64)
            if given.shape != ids.shape or given.min() < 0 or given.max() >= len(units):
                raise ValueError(f"{given.size} units of pages below {len(units)} for {ids.size}")
            which = given.astype(np.uint32)
        strides = None
        addresses = np.zeros(ids.size, np.uint64)
        if stored is not None:
            run, paging = kv.paging.run_bytes, kv.paging
            strides = StoredStrides(paging.rows * paging.cols * run, paging.cols * run, run)
            addresses = self._stored_addresses(kv, ids, first, count, stored, strides.plane, False)

        def launch_of(table_addresses: list[int]) -> Launch:
            planes_at, pages_at, units_at, which_at = table_addresses
            tables = Tables(planes_at, pages_at, units=units_at, page_units=which_at)
            return rope_launch(
                kv.paging, kv.element, rotary, is_neox, ids.size, count, tables, strides
            )

        tables = [*_page_tables(kv, ids, first, count, addresses), units, which]
        return self._launch(tables, launch_of, after, blocks)

    def _requantise(
        self,
        verb: str,
        kv: KvPages,
        page_ids: PageIds,
        form: QuantForm,
        stored: Memory,
        planes: tuple[int, int] | None,
        boosted: npt.NDArray[np.uint8] | None,
        after: int | None,
        blocks: int,
    ) -> DeviceJob:
        ids = _page_ids(kv, page_ids)
        first, count = _planes(kv, planes)
        tile = form.tile(kv.paging.rows, kv.paging.cols, kv.run_elements)
        boosts = _boosts(kv, form, count, boosted)
        is_target = verb == "quantise"
        addresses = self._stored_addresses(kv, ids, first, count, stored, tile.nbytes, is_target)

        def launch_of(table_addresses: list[int]) -> Launch:
            tables = Tables(*table_addresses)
            return quantise_launch(verb, form, kv.paging, kv.element, ids.size, count, tables)

        tables = [*_page_tables(kv, ids, first, count, addresses), *boosts]
        return self._launch(tables, launch_of, after, blocks)

    def _stored_addresses(
        self,
        kv: KvPages,
        ids: npt.NDArray[np.int64],
        first: int,
        count: int,
        stored: Memory,
        plane_bytes: int,
        is_target: bool,
    ) -> npt.NDArray[np.uint64]:
        extent = extent_of(self._device, "stored", stored, is_target=is_target)
        extent.require(ids.size * count * plane_bytes, _VECTOR_BYTES)
        check_apart(
            list(kv.extents[first : first + count]), [("stored", extent.address, extent.nbytes)]
        )
        blocks = np.arange(ids.size, dtype=np.uint64) * np.uint64(count * plane_bytes)
        return np.uint64(extent.address) + blocks


def _page_ids(kv: KvPages, page_ids: PageIds) -> npt.NDArray[np.int64]:
    ids = np.asarray(page_ids, np.int64)
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"page ids of the shape {ids.shape}, expected at least one in a row")
    if ids.min() < 0 or ids.max() >= kv.paging.page_count:
        raise ValueError(
            f"page ids from {ids.min()} to {ids.max()}, there are {kv.paging.page_count} pages"
        )
    return ids


def _check_distinct(page_ids: PageIds) -> None:
    ids = np.asarray(page_ids, np.int64)
    if np.unique(ids).size != ids.size:
        raise ValueError("a page is named twice, and two threads would write it")


def _planes(kv: KvPages, planes: tuple[int, int] | None) -> tuple[int, int]:
    first, count = planes or (0, len(kv.extents))
    if first < 0 or count < 1 or first + count > len(kv.extents):
        raise ValueError(f"planes {first} to {first + count - 1} of {len(kv.extents)}")
    return first, count


def _page_tables(
    kv: KvPages,
    ids: npt.NDArray[np.int64],
    first: int,
    count: int,
    stored: npt.NDArray[np.uint64],
) -> list[npt.NDArray[Any]]:
    pages = np.zeros(ids.size, _PAGE_ENTRY)
    pages["paged_offset"] = ids * kv.paging.page_stride
    pages["stored_address"] = stored
    return [kv.paging.plane_addresses[first : first + count], pages]


def _boosts(
    kv: KvPages, form: QuantForm, count: int, boosted: npt.NDArray[np.uint8] | None
) -> list[npt.NDArray[Any]]:
    if (boosted is not None) != bool(form.boosted):
        raise ValueError("boosted channels are given with a form that boosts, and only then")
    if boosted is None:
        return []
    shape = (count, kv.paging.cols, form.boosted)
    if boosted.dtype != np.uint8 or boosted.shape != shape:
        raise ValueError(
            f"boosted channels of {boosted.dtype} {boosted.shape}, expected uint8 {shape}"
        )
    wide = boosted.astype(np.int64)
    if (np.diff(wide, axis=2) <= 0).any() or wide.max() >= kv.run_elements:
        raise ValueError(
            f"boosted channels have to ascend and to be below {kv.run_elements} in every head"
        )
    return list(boost_tables(boosted, kv.run_elements))
