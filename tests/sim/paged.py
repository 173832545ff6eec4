"""Engine memory for the tests of kernels that compute: pages in numpy, in any layout."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from machine import Machine
from reference_elements import Floats, Raw, raw_type, to_elements, to_floats

from kvtier.backends.cuda_arguments import Element
from kvtier.device import Paging

GAP = 0xA5
"""What lies in memory that nobody may write."""
OFFSET = 16
"""Where planes and blocks begin: at a multiple of 16 and of no more, whatever holds them."""

Bytes = npt.NDArray[np.uint8]


def aligned(nbytes: int) -> Bytes:
    """`nbytes` at a multiple of 16 that is none of 32."""
    memory = np.full(nbytes + 64, GAP, np.uint8)
    offset = (16 - memory.ctypes.data) % 32
    return memory[offset : offset + nbytes]


@dataclass
class PagedKv:
    """Planes of pages [page, token, head, element], tokens or heads outside, with gaps between."""

    element: Element
    memory: list[Bytes]
    shape: tuple[int, int, int]
    """Tokens, heads, elements."""
    paging: Paging
    """Of this process's memory."""
    places: list[int] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        element: Element,
        planes: int,
        pages: int,
        shape: tuple[int, int, int],
        heads_first: bool,
        gap_bytes: int,
    ) -> PagedKv:
        tokens, heads, width = shape
        run = width * element.nbytes
        inner = (tokens if heads_first else heads) * run + gap_bytes
        page = (heads if heads_first else tokens) * inner + gap_bytes
        row, col = (run, inner) if heads_first else (inner, run)
        memory = [aligned(pages * page) for _ in range(planes)]
        addresses = np.array([each.ctypes.data for each in memory], np.uint64)
        paging = Paging(addresses, pages, page, tokens, row, heads, col, run)
        return cls(element, memory, shape, paging)

    @classmethod
    def like(cls, other: PagedKv) -> PagedKv:
        """Memory of its own of the same form, filled with gaps."""
        memory = [aligned(each.nbytes) for each in other.memory]
        addresses = np.array([each.ctypes.data for each in memory], np.uint64)
        paging = dataclasses.replace(other.paging, plane_addresses=addresses)
        return cls(other.element, memory, other.shape, paging)

    def view(self, plane: int) -> Raw:
        """[page, token, head, element] of the bits."""
        kind = raw_type(self.element)
        at = self.paging
        strides = (at.page_stride, at.row_stride, at.col_stride, self.element.nbytes)
        shape = (at.page_count, *self.shape)
        return np.ndarray(shape, kind, self.memory[plane].data, 0, strides)

    def put(self, values: Floats) -> None:
        """[plane, page, token, head, element]."""
        for plane, each in enumerate(values):
            self.view(plane)[...] = to_elements(each, self.element).reshape(each.shape)

    def floats(self, plane: int, page: int) -> Floats:
        return to_floats(np.ascontiguousarray(self.view(plane)[page]), self.element)

    def put_on(self, machine: Machine) -> Paging:
        """The same pages on a machine."""
        self.places = [put_block(machine, each) for each in self.memory]
        return dataclasses.replace(self.paging, plane_addresses=np.array(self.places, np.uint64))

    def take_from(self, machine: Machine) -> None:
        """What the machine made of them."""
        for memory, place in zip(self.memory, self.places, strict=True):
            memory[:] = get_block(machine, place)

    def is_gap_intact(self) -> bool:
        """Whether nothing but the elements was ever written."""
        for plane, memory in enumerate(self.memory):
            saved = self.view(plane).copy()
            self.view(plane)[...] = np.frombuffer(
                bytes([GAP] * self.element.nbytes), raw_type(self.element)
            )[0]
            is_intact = bool((memory == GAP).all())
            self.view(plane)[...] = saved
            if not is_intact:
                return False
        return True


def put_block(machine: Machine, memory: Bytes) -> int:
    """The address of its copy on a machine, at a multiple of 16 only."""
    return machine.put(np.concatenate([np.full(OFFSET, GAP, np.uint8), memory])) + OFFSET


def get_block(machine: Machine, address: int) -> Bytes:
    """What `put_block` put there, as it is now."""
    return machine.get(address - OFFSET)[OFFSET:]


def put_table(machine: Machine, table: npt.NDArray[np.generic]) -> int:
    """The address of a table's copy; 0 if it is empty."""
    return machine.put(table) if table.size else 0


PAGE_ENTRY = np.dtype([("paged_offset", "<i8"), ("stored_address", "<u8")])


def page_table(paging: Paging, page_ids: list[int], stored: list[int]) -> npt.NDArray[np.void]:
    """The kernels' table of pages."""
    table = np.zeros(len(page_ids), PAGE_ENTRY)
    table["paged_offset"] = np.array(page_ids) * paging.page_stride
    table["stored_address"] = stored
    return table
