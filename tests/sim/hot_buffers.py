"""The hot buffer on a machine, compared with the reference; the machine may be a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from machine import Machine
from paged import aligned, get_block, put_block
from reference_hot import Step, resolve

from kvtier.backends.cuda_arguments import FastDiv, HotArgs, HotCopyArgs
from kvtier.backends.cuda_launches import hot_copy_launch, hot_resolve_launch, hot_table_size

UNWRITTEN = -77
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Case:
    """What a step asks for."""

    requests: int
    top_count: int
    capacity: int
    token_end: int
    threads: int
    kind: str
    """`distinct` tokens; `repeated`: each any number of times; `odd`: some that are none."""

    def __str__(self) -> str:
        return f"{self.kind}-{self.top_count}-in-{self.capacity}"


CASES = [
    Case(3, 64, 450, 900, 128, "distinct"),
    Case(2, 200, 450, 900, 64, "distinct"),
    Case(2, 96, 96, 150, 64, "repeated"),  # no slot to spare
    Case(2, 33, 40, 1 << 30, 32, "odd"),
    Case(1, 1, 1, 5, 32, "repeated"),
    Case(1, 300, 301, 400, 1024, "odd"),
]

ROWS = [(16, 1152), (16, 16), (16, 4096), (8, 40), (4, 12)]
"""Bytes of a vector and of a row."""


class _Buffer:
    """The state of all requests' hot buffers, and what a step writes."""

    def __init__(self, machine: Machine, case: Case, rng: np.random.Generator) -> None:
        self.machine, self.case = machine, case
        self.slot_tokens = np.full((case.requests, case.capacity), -1, np.int32)
        order = [rng.permutation(case.capacity) for _ in range(case.requests)]
        self.order = np.array(order, np.uint16)
        shape = (case.requests, case.top_count)
        self.top_slots = np.empty(shape, np.int32)
        self.missing_tokens = np.empty(shape, np.int32)
        self.missing_slots = np.empty(shape, np.int32)
        self.missing_counts = np.empty(case.requests, np.int32)

    def resolve(self, top_tokens: Ints) -> None:
        """On the machine, from and to this process's memory."""
        case, machine = self.case, self.machine
        written = [self.top_slots, self.missing_tokens, self.missing_slots, self.missing_counts]
        for each in written:
            each.fill(UNWRITTEN)
        arrays: list[npt.NDArray[Any]] = [top_tokens, self.slot_tokens, self.order, *written]
        addresses = [machine.put(each) for each in arrays]
        arguments = HotArgs(
            *addresses,
            case.top_count,
            case.capacity,
            hot_table_size(case.top_count),
            case.token_end,
        )
        launch = hot_resolve_launch(arguments, case.requests, case.threads)
        machine.launch(
            launch.name, launch.blocks, launch.threads, launch.shared_bytes, launch.arguments
        )
        for array, address in zip(arrays[1:], addresses[1:], strict=True):
            array[...] = machine.get(address).view(array.dtype).reshape(array.shape)
        machine.clear()

    def check(self, request: int, step: Step) -> None:
        """What the request's part became."""
        assert self.top_slots[request].tolist() == step.top_slots
        count = int(self.missing_counts[request])
        assert count == len(step.missing)
        tokens = self.missing_tokens[request, :count].tolist()
        slots = self.missing_slots[request, :count].tolist()
        assert list(zip(tokens, slots, strict=True)) == step.missing
        assert self.order[request].tolist() == step.order
        assert self.slot_tokens[request].tolist() == step.slot_tokens
        for each in (self.missing_tokens, self.missing_slots):
            assert (each[request, count:] == UNWRITTEN).all()


def check_steps(machine: Machine, case: Case, seed: int, steps: int = 3) -> None:
    """Step after step resolves as the reference does."""
    rng = np.random.default_rng(seed)
    buffer = _Buffer(machine, case, rng)
    for _ in range(steps):
        top_tokens = _top_tokens(case, rng)
        expected = [
            resolve(
                top_tokens[request].tolist(),
                buffer.slot_tokens[request].tolist(),
                buffer.order[request].tolist(),
                case.token_end,
            )
            for request in range(case.requests)
        ]
        buffer.resolve(top_tokens)
        for request, each in enumerate(expected):
            buffer.check(request, each)


def _top_tokens(case: Case, rng: np.random.Generator) -> Ints:
    shape = (case.requests, case.top_count)
    end = min(case.token_end, 4 * case.capacity)
    if case.kind == "distinct":
        rows = [rng.choice(end, case.top_count, replace=False) for _ in range(case.requests)]
        return np.array(rows, np.int32)
    tokens = rng.integers(0, end, shape)
    if case.kind == "odd":  # padding, and ids that no request has
        odd = rng.random(shape)
        tokens[odd < 0.2] = -1
        tokens[(odd >= 0.2) & (odd < 0.3)] = -(2**31)
        tokens[(odd >= 0.3) & (odd < 0.4)] = min(case.token_end, 2**31 - 1)
    return tokens.astype(np.int32)


def check_rows(machine: Machine, vector_bytes: int, row_bytes: int, blocks: int) -> None:
    """Missing rows of two layers come, from parts of 32 tokens, and leave the gaps between rows."""
    rng = np.random.default_rng(row_bytes)
    requests, top_count, capacity, part_tokens, parts, layers = 3, 20, 24, 32, 2, 2
    layer_bytes = part_tokens * row_bytes
    host = [
        [rng.integers(0, 256, layers * layer_bytes, np.uint8) for _ in range(parts)]
        for _ in range(requests)
    ]
    counts = np.array([20, 0, 7], np.int32)
    tokens = np.array([rng.permutation(70)[:top_count] for _ in range(requests)], np.int32)
    slots = np.array([rng.permutation(capacity)[:top_count] for _ in range(requests)], np.int32)
    stride = row_bytes + 16
    for layer in range(layers):
        target = aligned(requests * capacity * stride)
        expected = target.copy().reshape(requests, capacity, stride)
        for request in range(requests):
            for number in range(counts[request]):
                part, row = divmod(int(tokens[request, number]), part_tokens)
                if part < parts:  # the others are beyond what the host has
                    first = layer * layer_bytes + row * row_bytes
                    bytes_ = host[request][part][first : first + row_bytes]
                    expected[request, slots[request, number], :row_bytes] = bytes_
        sources = [[put_block(machine, part) for part in row] for row in host]
        target_at = put_block(machine, target)
        arguments = HotCopyArgs(
            machine.put(np.array(sources, np.uint64)),
            machine.put(tokens),
            machine.put(slots),
            machine.put(counts),
            target_at,
            layer * layer_bytes,
            row_bytes,
            stride,
            capacity * stride,
            row_bytes,
            requests,
            top_count,
            parts,
            FastDiv(part_tokens),
        )
        launch = hot_copy_launch(arguments, vector_bytes)
        machine.launch(launch.name, blocks, launch.threads, 0, launch.arguments)
        found = get_block(machine, target_at)
        machine.clear()
        assert np.array_equal(found, expected.reshape(-1)), f"layer {layer}"
