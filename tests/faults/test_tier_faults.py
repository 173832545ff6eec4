"""A place below that fails, hangs or lies, seen from the whole library's caller.

Whatever the place does: never a wrong byte, never a wait without end, nothing leaked, the reason in
the metrics and in one log line, and all well again once the place is.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier import BackendUnavailable, KvLayout, KVTier, Namespace, PagedKv
from kvtier.backends.posix import PosixBackend, PosixOptions
from kvtier.testing.connector_suite import ConnectorSuite, toy_kv
from kvtier.testing.faults import Fault, FaultyBackend

LAYERS, PAGE, ROW, PAGES = 4, 16, 64, 200
LAYOUT = KvLayout.per_token(
    layers=LAYERS, planes=1, page_tokens=PAGE, heads=1, head_bytes=ROW, dtype="u1"
)
RECORD = 4096 + 4 * 16384
NOISE = 0xEE
BOUND_S = 20.0  # far above what a machine under load takes, far below a gate's own minute
prompt = ConnectorSuite.prompt


class Setting:
    """A tier over a disk that fails on command, and numpy pages attached to it."""

    def __init__(self, root: Path, memory: int = 64 * RECORD, **settings: Any) -> None:
        self.disk = FaultyBackend(
            PosixBackend(PosixOptions(path=str(root), durable=False)), seed=11
        )
        config = {
            "tiers": [
                {"kind": "memory", "capacity": memory},
                {"kind": "posix", "name": "disk", "capacity": "1 GiB", "path": str(root)},
            ],
            "close_timeout_s": 2.0,
            **settings,
        }
        self.tier = KVTier.open(config, backends={"disk": self.disk})
        self.pages = np.full((LAYERS, PAGES, PAGE, ROW), NOISE, dtype=np.uint8)
        kv = PagedKv(
            plane_addresses=np.array([layer.ctypes.data for layer in self.pages], np.uint64),
            page_count=PAGES,
            page_stride=PAGE * ROW,
            row_stride=ROW,
            col_stride=ROW,
            owner=self.pages,
        )
        self.space = self.tier.attach(Namespace(model="m", waves=4), LAYOUT, kv)

    def store(self, tokens: list[int]) -> int:
        count = len(tokens) // PAGE
        kv = toy_kv(tokens, LAYERS, 1, ROW)[:, 0, : count * PAGE]
        self.pages[:, :count] = kv.reshape(LAYERS, count, PAGE, ROW)
        return self.tier.store(self.space, tokens, list(range(count))).stored_tokens

    def on_disk_only(self, tokens: list[int]) -> None:
        self.store(tokens)
        assert self.tier.move(self.space, tokens, "disk") == len(tokens)

    def load(self, tokens: list[int], timeout_s: float = BOUND_S) -> int:
        """Tokens that came back, all of them right, and the rest of them reported."""
        hit = self.tier.lookup(self.space, tokens)
        pages = list(range(100, 100 + hit.tokens // PAGE))
        self.pages[:] = NOISE
        result = self.tier.load(hit, pages, timeout_s=timeout_s).wait()
        self.tier.release(hit)
        assert result is not None
        assert result.failed_pages == tuple(pages[result.tokens // PAGE :])
        got = self.pages[:, pages].reshape(LAYERS, -1, ROW)[:, : result.tokens]
        assert np.array_equal(got, toy_kv(tokens, LAYERS, 1, ROW)[:, 0, : result.tokens])
        assert (np.delete(self.pages, pages, axis=1) == NOISE).all(), "foreign pages touched"
        return result.tokens

    def stat(self, name: str) -> dict[str, int]:
        stat: dict[str, int] = self.tier.stat()["tiers"][name]
        return stat

    def load_leases_end(self) -> bool:
        """Wait until no load holds chunks any more, ended ones whose bytes come late included."""
        for lane in self.tier.loader._lanes:
            idle = threading.Event()
            if not (lane.offer(idle.set) and idle.wait(BOUND_S)):
                return False
        return True

    def nothing_leaked(self) -> None:
        """All of it can go: no lease count, no staging room, no account is left behind."""
        assert self.tier.flush(BOUND_S)
        disk = self.stat("disk")
        assert disk["pending_bytes"] == 0
        stored = list(self.disk.scan())
        assert (disk["chunks"], disk["used_bytes"]) == (
            len(stored),
            sum(chunk.nbytes for chunk in stored),
        )
        assert self.tier.cleanup().leased == 0
        assert (self.tier.stat()["chunks"], self.stat("memory")["used_bytes"]) == (0, 0)
        assert list(self.disk.scan()) == []


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    setting = Setting(tmp_path)
    yield setting
    setting.disk.heal()
    setting.tier.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kvtier"]


# Stores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "metric", "reason"),
    [
        (Fault.NO_SPACE, "write_back_failed_disk", "ENOSPC"),
        (Fault.FAILED, "write_back_failed_disk", "EIO"),
        (Fault.RETRY, "write_back_retry_disk", "busy"),
        (Fault.RAISED, "write_back_failed_disk", "write-back failed"),
    ],
)
def test_a_disk_that_takes_nothing_is_counted_told_once_and_used_again(
    setting: Setting, fault: Fault, metric: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvtier")
    setting.disk.break_on("put", fault)
    for seed in range(3):
        assert setting.store(prompt(512, seed=seed)) == 512
        assert setting.tier.flush(BOUND_S)
    assert setting.tier.metrics.count(metric) == 6
    assert len(lines(caplog)) == 1, lines(caplog)
    assert reason in caplog.text
    assert "disk" in lines(caplog)[0]
    assert setting.stat("disk")["chunks"] == 0
    assert setting.load(prompt(512, seed=0)) == 512, "memory has it all the same"
    setting.disk.heal()
    setting.on_disk_only(prompt(512, seed=9))
    assert setting.load(prompt(512, seed=9)) == 512
    setting.disk.break_on("put", fault)
    setting.store(prompt(512, seed=10))
    assert setting.tier.flush(BOUND_S)
    assert len(lines(caplog)) == 2, "a fault that is back is told again"
    setting.disk.heal()
    setting.nothing_leaked()


def test_one_refused_chunk_costs_no_other_its_place(setting: Setting) -> None:
    setting.disk.break_on("put", Fault.FAILED, count=1)
    setting.store(prompt(1024))
    assert setting.tier.flush(BOUND_S)
    assert setting.stat("disk")["chunks"] == 3
    assert setting.load(prompt(1024)) == 1024
    setting.nothing_leaked()


def test_a_prefix_that_only_memory_had_takes_its_continuation_off_the_disk(
    tmp_path: Path,
) -> None:
    setting = Setting(tmp_path, memory=2 * RECORD)
    setting.disk.break_on("put", Fault.FAILED, count=1)
    setting.store(prompt(512, seed=1))
    assert setting.tier.flush(BOUND_S)
    assert setting.stat("disk")["chunks"] == 1
    setting.store(prompt(512, seed=2))
    assert setting.tier.flush(BOUND_S)
    assert setting.stat("disk")["chunks"] == len(list(setting.disk.scan())) == 2
    setting.nothing_leaked()
    setting.tier.close()


def test_a_chunk_queued_twice_is_counted_once(setting: Setting) -> None:
    gate = setting.disk.hold("put")
    setting.store(prompt(256, seed=1))
    assert gate.wait_reached()
    setting.store(prompt(512, seed=2))
    mover = threading.Thread(target=setting.tier.move, args=(setting.space, prompt(512, 2), "disk"))
    mover.start()
    while setting.stat("disk")["pending_bytes"] < 5 * RECORD:
        assert mover.is_alive()
    gate.open()
    mover.join(BOUND_S)
    assert setting.stat("disk")["used_bytes"] == 3 * RECORD
    setting.nothing_leaked()


def test_a_record_that_cannot_be_removed_is_counted_and_told(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    setting.store(prompt(512))
    setting.disk.break_on("remove", Fault.FAILED)
    setting.tier.cleanup()
    assert setting.tier.metrics.count("remove_failed_disk") == 2
    assert len(lines(caplog)) == 1
    assert "chunk not removed: injected: EIO" in caplog.text
    assert setting.load(prompt(512)) == 0


def test_a_store_without_staging_room_is_dropped_and_counted(tmp_path: Path) -> None:
    """The disk hangs, so what memory holds may not leave; the engine does not wait for it."""
    setting = Setting(tmp_path, memory=4 * RECORD)
    gate = setting.disk.hold("put")
    assert setting.store(prompt(1024, seed=1)) == 1024
    assert gate.wait_reached()
    assert setting.store(prompt(512, seed=2)) == 0
    assert setting.tier.metrics.count("store_dropped_tokens") == 512
    assert setting.load(prompt(1024, seed=1)) == 1024
    setting.disk.heal()
    assert setting.tier.flush(BOUND_S)
    assert setting.store(prompt(512, seed=2)) == 512
    setting.nothing_leaked()
    setting.tier.close()


def test_a_full_queue_downwards_keeps_chunks_in_memory_and_counts_them(tmp_path: Path) -> None:
    setting = Setting(tmp_path, write_back_queue=2 * RECORD)
    gate = setting.disk.hold("put")
    setting.store(prompt(512, seed=1))
    assert gate.wait_reached()
    assert setting.store(prompt(512, seed=2)) == 512
    assert setting.tier.metrics.count("write_back_refused_disk") == 2
    assert setting.load(prompt(512, seed=2)) == 512
    setting.disk.heal()
    setting.nothing_leaked()
    setting.tier.close()


def test_a_disk_that_hangs_at_close_is_left_behind_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting = Setting(tmp_path, close_timeout_s=0.1)
    gate = setting.disk.hold("put")
    setting.store(prompt(512))
    assert gate.wait_reached()
    closing = threading.Thread(target=setting.tier.close)
    closing.start()
    closing.join(BOUND_S)
    assert not closing.is_alive()
    assert "closed before everything was written down" in caplog.text


# Loads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "metric"),
    [
        (Fault.RETRY, "read_retry_disk"),
        (Fault.FAILED, "read_failed_disk"),
        (Fault.TORN, "read_corrupt_disk"),
        (Fault.FLIPPED, "read_corrupt_disk"),
        (Fault.MISSING, "read_missing_disk"),
        (Fault.RAISED, "loads_failed"),
    ],
)
def test_a_read_that_fails_or_lies_is_recomputed_and_counted(
    setting: Setting, fault: Fault, metric: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvtier")
    tokens = prompt(1024)
    setting.on_disk_only(tokens)
    setting.disk.break_on("get", fault, count=1)
    assert setting.load(tokens) == 0, "the first chunk is lost, so what follows is of no use"
    assert setting.tier.metrics.count(metric) == 1
    assert len(lines(caplog)) == 1, lines(caplog)
    again = setting.load(tokens)
    assert again == (1024 if fault in (Fault.RETRY, Fault.RAISED) else 0)
    setting.store(tokens)
    assert setting.load(tokens) == 1024
    setting.nothing_leaked()


@pytest.mark.parametrize("fault", [Fault.TORN, Fault.FLIPPED])
def test_bytes_spoiled_on_the_way_down_are_never_served(setting: Setting, fault: Fault) -> None:
    tokens = prompt(1024)
    setting.disk.break_on("put", fault, count=2)
    setting.on_disk_only(tokens)
    assert setting.load(tokens) == 0
    setting.disk.heal()
    setting.store(tokens)
    assert setting.load(tokens) == 1024
    setting.nothing_leaked()


def test_a_hung_read_ends_by_the_deadline_and_never_touches_pages_afterwards(
    setting: Setting,
) -> None:
    """The engine has taken the pages back when the bytes arrive at last."""
    tokens = prompt(1024)
    setting.on_disk_only(tokens)
    gate = setting.disk.hold("get")
    begin_s = time.monotonic()
    assert setting.load(tokens, timeout_s=0.1) == 0
    assert time.monotonic() - begin_s < BOUND_S
    assert gate.wait_reached()
    by_others = 0x33
    setting.pages[:] = by_others
    setting.disk.heal()
    assert setting.load_leases_end()
    assert (setting.pages == by_others).all()
    assert setting.load(tokens) == 1024, "what came late is of use to the next"
    setting.nothing_leaked()


def test_a_cancelled_load_leaves_pages_alone_whenever_the_bytes_come(setting: Setting) -> None:
    tokens = prompt(1024)
    setting.on_disk_only(tokens)
    gate = setting.disk.hold("get")
    hit = setting.tier.lookup(setting.space, tokens)
    load = setting.tier.load(hit, list(range(64)))
    assert gate.wait_reached()
    result = load.cancel()
    assert result.failed_pages == tuple(range(64))
    setting.pages[:] = NOISE
    setting.tier.release(hit)
    setting.disk.heal()
    assert setting.load_leases_end()
    assert (setting.pages == NOISE).all()
    setting.nothing_leaked()


def test_a_hung_disk_does_not_hold_up_loads_from_memory(setting: Setting) -> None:
    setting.on_disk_only(prompt(512, seed=1))
    setting.store(prompt(512, seed=2))
    gate = setting.disk.hold("get")
    hit = setting.tier.lookup(setting.space, prompt(512, seed=1))
    stuck = setting.tier.load(hit, list(range(32)))
    assert gate.wait_reached()
    assert setting.load(prompt(512, seed=2)) == 512
    stuck.cancel()
    setting.tier.release(hit)
    setting.disk.heal()
    assert setting.load_leases_end()
    setting.nothing_leaked()


def test_a_load_that_finds_no_staging_room_is_a_miss_within_its_deadline(tmp_path: Path) -> None:
    setting = Setting(tmp_path, memory=4 * RECORD)
    wanted = prompt(512, seed=1)
    setting.on_disk_only(wanted)
    setting.store(prompt(1024, seed=2))
    assert setting.tier.flush(BOUND_S)
    pinned = setting.tier.pin(setting.space, prompt(1024, seed=2), ttl_s=1000)
    begin_s = time.monotonic()
    assert setting.load(wanted, timeout_s=0.1) == 0
    assert time.monotonic() - begin_s < BOUND_S
    assert setting.load_leases_end()
    setting.tier.release(pinned)
    assert setting.tier.metrics.count("load_no_staging") == 2
    assert setting.load(wanted) == 512
    setting.nothing_leaked()
    setting.tier.close()


def test_a_read_that_hangs_at_close_is_left_behind_in_time(tmp_path: Path) -> None:
    setting = Setting(tmp_path, close_timeout_s=0.1)
    tokens = prompt(512)
    setting.on_disk_only(tokens)
    gate = setting.disk.hold("get")
    load = setting.tier.load(setting.tier.lookup(setting.space, tokens), list(range(32)))
    assert gate.wait_reached()
    closing = threading.Thread(target=setting.tier.close)
    closing.start()
    closing.join(BOUND_S)
    assert not closing.is_alive()
    result = load.result()
    assert result is not None
    assert (result.tokens, result.failed_pages) == (0, tuple(range(32)))


def test_a_read_that_hangs_does_not_hold_up_the_end_of_the_process(tmp_path: Path) -> None:
    """The process must end by itself while a thread is stuck in the disk's read for good."""
    code = f"""
import threading
from pathlib import Path
from test_tier_faults import Setting, prompt
setting = Setting(Path({str(tmp_path)!r}), close_timeout_s=0.1)
tokens = prompt(512)
setting.on_disk_only(tokens)
reached = threading.Event()
def hang(*_: object) -> None:
    reached.set()
    threading.Event().wait()
setting.disk.get = hang
setting.tier.load(setting.tier.lookup(setting.space, tokens), list(range(32)))
assert reached.wait({BOUND_S})
setting.tier.close()
print("closed", flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=2 * BOUND_S,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "closed\n"), run.stderr


# Mixtures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_disk_that_fails_at_random_never_gives_a_wrong_byte(tmp_path: Path, seed: int) -> None:
    setting = Setting(tmp_path, memory=8 * RECORD)
    for operation in ("put", "get"):
        for fault in (Fault.RETRY, Fault.FAILED, Fault.NO_SPACE, Fault.TORN, Fault.FLIPPED):
            setting.disk.break_on(operation, fault, rate=0.05)
        setting.disk.break_on(operation, Fault.RAISED, rate=0.02)
    draw = np.random.default_rng(seed)
    for _ in range(40):
        tokens = prompt(int(draw.integers(1, 5)) * 256, seed=int(draw.integers(0, 6)))
        if draw.random() < 0.5:
            setting.store(tokens)
        else:
            setting.load(tokens)
    setting.disk.heal()
    setting.nothing_leaked()
    setting.tier.close()


# Opening and room ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["a file", "a file/below", "/proc/kvtier"])
def test_a_folder_that_cannot_be_written_is_named_at_open(tmp_path: Path, where: str) -> None:
    (tmp_path / "a file").write_text("in the way")
    path = tmp_path / where
    tiers = [
        {"kind": "memory", "capacity": "1 MiB"},
        {"kind": "posix", "capacity": "1 MiB", "path": str(path)},
    ]
    with pytest.raises(BackendUnavailable, match=f"{path} cannot be used: "):
        KVTier.open({"tiers": tiers})


def test_a_read_only_file_system_is_named_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(path: Any, flags: int, *rest: int, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BackendUnavailable, match=f"{tmp_path} cannot be used: Read-only"):
        Setting(tmp_path)


def test_room_that_is_left_to_others_bounds_the_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a disk that others fill: nothing fits, and it is told once."""
    config = {
        "tiers": [
            {"kind": "memory", "capacity": 8 * RECORD},
            {
                "kind": "posix",
                "name": "disk",
                "capacity": "1 GiB",
                "path": str(tmp_path),
                "min_free": 1 << 60,
            },
        ]
    }
    with KVTier.open(config) as tier:
        pages = np.zeros((LAYERS, PAGES, PAGE, ROW), np.uint8)
        kv = PagedKv(
            plane_addresses=np.array([layer.ctypes.data for layer in pages], np.uint64),
            page_count=PAGES,
            page_stride=PAGE * ROW,
            row_stride=ROW,
            col_stride=ROW,
            owner=pages,
        )
        space = tier.attach(Namespace(model="m", waves=4), LAYOUT, kv)
        for seed in range(3):
            assert tier.store(space, prompt(512, seed=seed), list(range(32))).stored_tokens == 512
            assert tier.flush(BOUND_S)
        assert tier.metrics.count("write_back_no_room_disk") == 6
        assert [line for line in lines(caplog) if "no room: bound by free space" in line] == lines(
            caplog
        )
        assert len(lines(caplog)) == 1
        assert list(tmp_path.rglob("*.kvc")) == []
