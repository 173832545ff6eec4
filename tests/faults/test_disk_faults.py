"""Whatever happens to the cache folder: never a wrong byte, books exact, the reason to be seen."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier import BackendUnavailable, KvLayout, KVTier, Namespace, PagedKv
from kvtier.testing.connector_suite import ConnectorSuite, toy_kv

LAYERS, PAGE, ROW, PAGES = 4, 16, 64, 200
LAYOUT = KvLayout.per_token(
    layers=LAYERS, planes=1, page_tokens=PAGE, heads=1, head_bytes=ROW, dtype="u1"
)
NAMESPACE = Namespace(model="m", waves=4)
prompt = ConnectorSuite.prompt


class Engine:
    """Numpy pages attached to a tier; store computes, check compares."""

    def __init__(self, tier: KVTier) -> None:
        self.tier = tier
        self.memory = np.zeros((LAYERS, PAGES, PAGE, ROW), dtype=np.uint8)
        kv = PagedKv(
            plane_addresses=np.array([layer.ctypes.data for layer in self.memory], np.uint64),
            page_count=PAGES,
            page_stride=PAGE * ROW,
            row_stride=ROW,
            col_stride=ROW,
            owner=self.memory,
        )
        self.space = tier.attach(NAMESPACE, LAYOUT, kv)

    def store(self, tokens: list[int]) -> None:
        count = len(tokens) // PAGE
        kv = toy_kv(tokens, LAYERS, 1, ROW)[:, 0, : count * PAGE]
        self.memory[:, :count] = kv.reshape(LAYERS, count, PAGE, ROW)
        self.tier.store(self.space, tokens, range(count))

    def check(self, tokens: list[int]) -> int:
        """Load and compare; tokens that came back, all right."""
        hit = self.tier.lookup(self.space, tokens)
        self.memory[:] = 0xEE
        pages = list(range(100, 100 + hit.tokens // PAGE))
        result = self.tier.load(hit, pages).wait()
        self.tier.release(hit)
        assert result is not None
        got = self.memory[:, pages].reshape(LAYERS, -1, ROW)[:, : result.tokens]
        assert np.array_equal(got, toy_kv(tokens, LAYERS, 1, ROW)[:, 0, : result.tokens])
        return result.tokens


def open_tier(root: Path, memory: str = "64 MiB") -> KVTier:
    return KVTier.open(
        {
            "tiers": [
                {"kind": "memory", "capacity": memory},
                {"kind": "posix", "name": "disk", "capacity": "1 GiB", "path": str(root)},
            ]
        }
    )


def files_of(root: Path) -> list[Path]:
    return sorted(f for f in root.rglob("*.kvc") if f.parent.name != "quarantine")


def books_are_exact(tier: KVTier, root: Path) -> None:
    tier.flush()
    stat = tier.stat()["tiers"]["disk"]
    files = files_of(root)
    assert (len(files), sum(f.stat().st_size for f in files)) == (
        stat["chunks"],
        stat["used_bytes"],
    )


def truncate(files: list[Path]) -> None:
    os.truncate(files[0], files[0].stat().st_size // 2)


def cut_the_tail_block(files: list[Path]) -> None:
    os.truncate(files[0], files[0].stat().st_size - 4096)


def empty(files: list[Path]) -> None:
    os.truncate(files[0], 0)


def flip_a_payload_bit(files: list[Path]) -> None:
    content = bytearray(files[0].read_bytes())
    content[-100] ^= 1
    files[0].write_bytes(content)


def flip_a_header_bit(files: list[Path]) -> None:
    content = bytearray(files[0].read_bytes())
    content[50] ^= 1
    files[0].write_bytes(content)


def flip_a_table_bit(files: list[Path]) -> None:
    content = bytearray(files[0].read_bytes())
    content[200] ^= 1
    files[0].write_bytes(content)


def swap_two(files: list[Path]) -> None:
    spare = files[0].with_suffix(".spare")
    files[0].rename(spare)
    files[1].rename(files[0])
    spare.rename(files[1])


def fill_with_foreign_bytes(files: list[Path]) -> None:
    files[0].write_bytes(os.urandom(files[0].stat().st_size))


def fill_with_zeros(files: list[Path]) -> None:
    files[0].write_bytes(bytes(files[0].stat().st_size))


def delete(files: list[Path]) -> None:
    files[0].unlink()


DAMAGE = [
    truncate,
    cut_the_tail_block,
    empty,
    flip_a_payload_bit,
    flip_a_header_bit,
    flip_a_table_bit,
    swap_two,
    fill_with_foreign_bytes,
    fill_with_zeros,
    delete,
]


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_on_disk_is_recomputed_and_never_served(
    tmp_path: Path,
    damage: Callable[[list[Path]], None],
    restart: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "kvtier")
    tokens = prompt(4 * 256)
    tier = open_tier(tmp_path)
    engine = Engine(tier)
    engine.store(tokens)
    assert tier.flush()
    if restart:
        tier.close()
        damage(files_of(tmp_path))
        tier = open_tier(tmp_path)
        engine = Engine(tier)
    else:
        damage(files_of(tmp_path))
        tier.cleanup(tier="memory")
    with tier:
        first = engine.check(tokens)
        assert first < len(tokens)
        assert engine.check(tokens) <= first, "what was damaged is offered again"
        books_are_exact(tier, tmp_path)
        counted = tier.metrics.snapshot()
        assert any("damaged" in name or "unreachable" in name for name in counted), counted
        if damage is not delete or not restart:
            assert any("disk" in record.getMessage() for record in caplog.records)
        engine.store(tokens)
        assert engine.check(tokens) == len(tokens)
        tier.flush()
        tier.cleanup(tier="memory")
        assert engine.check(tokens) == len(tokens)
        books_are_exact(tier, tmp_path)


def test_foreign_files_are_left_alone_and_not_served(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        Engine(tier).store(prompt(256))
    folder = files_of(tmp_path)[0].parent
    foreign = [tmp_path / "notes.txt", folder / "photo.jpg", folder / "abc.kvc"]
    for path in foreign:
        path.write_bytes(b"mine")
    with open_tier(tmp_path) as tier:
        engine = Engine(tier)
        assert engine.check(prompt(256)) == 256
        assert tier.stat()["tiers"]["disk"]["chunks"] == 1
        tier.cleanup()
    assert [path.read_bytes() for path in foreign] == [b"mine"] * 3


def test_a_lost_lmdb_is_rebuilt_from_the_manifests(tmp_path: Path) -> None:
    tokens = prompt(600)
    with open_tier(tmp_path) as tier:
        Engine(tier).store(tokens)
    for path in tmp_path.iterdir():
        if path.is_dir() and any(child.name.endswith(".mdb") for child in path.iterdir()):
            shutil.rmtree(path)
    with open_tier(tmp_path) as tier:
        assert Engine(tier).check(tokens) == 592
        books_are_exact(tier, tmp_path)


def test_another_layout_dtype_chunk_size_or_model_is_a_miss(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        Engine(tier).store(prompt(512))
    with open_tier(tmp_path) as tier:
        other_layout = KvLayout.per_token(
            layers=LAYERS, planes=1, page_tokens=32, heads=1, head_bytes=ROW, dtype="u1"
        )
        other_dtype = KvLayout.per_token(
            layers=LAYERS, planes=1, page_tokens=PAGE, heads=1, head_bytes=ROW, dtype="i1"
        )
        for namespace, layout in [
            (NAMESPACE, other_layout),
            (NAMESPACE, other_dtype),
            (Namespace(model="m", waves=4, chunk_tokens=128), LAYOUT),
            (Namespace(model="n", waves=4), LAYOUT),
        ]:
            assert tier.lookup(tier.attach(namespace, layout), prompt(512)).tokens == 0
        assert Engine(tier).check(prompt(512)) == 512


HOLDER = """
import sys, time
from kvtier import KVTier
tier = KVTier.open({"tiers": [{"kind": "memory", "capacity": "1 MiB"},
                              {"kind": "posix", "capacity": "1 MiB", "path": sys.argv[1]}]})
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_process_on_the_folder_is_refused_with_the_firsts_name(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        with pytest.raises(BackendUnavailable, match=str(first.pid)):
            open_tier(tmp_path)
        first.kill()
    open_tier(tmp_path).close()


STORER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_disk_faults import Engine, open_tier, prompt
from pathlib import Path
tier = open_tier(Path(sys.argv[1]))
engine = Engine(tier)
for seed in range(1000):
    engine.store(prompt(1024, seed=seed))
    tier.flush()
    print(seed, flush=True)
"""


@pytest.mark.parametrize("after", [1, 4, 9])
def test_kill_during_stores_loses_nothing_acknowledged_and_serves_nothing_half(
    tmp_path: Path, after: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", STORER, str(tmp_path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    ) as storer:
        assert storer.stdout is not None
        for _ in range(after):
            done = int(storer.stdout.readline())
        time.sleep(0.001 * after)  # no synchronisation: it moves the kill into a store
        os.kill(storer.pid, signal.SIGKILL)
        done = max([done, *(int(line) for line in storer.stdout)])
    with open_tier(tmp_path) as tier:
        engine = Engine(tier)
        books_are_exact(tier, tmp_path)
        for seed in range(done + 1):
            assert engine.check(prompt(1024, seed=seed)) == 1024
        assert engine.check(prompt(1024, seed=done + 1)) in (0, 256, 512, 768, 1024)
        leftovers = [f for f in tmp_path.rglob("*") if f.is_file() and "tmp" in f.name]
        assert leftovers == []
