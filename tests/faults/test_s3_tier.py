"""A bucket as a tier: what one process stored another finds by key, and no fault of it is felt."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import boto3
import numpy as np
import pytest

from kvtier import KvLayout, KVTier, Namespace, PagedKv, hierarchy
from kvtier.testing.connector_suite import ConnectorSuite, toy_kv
from kvtier.testing.fault_proxy import Fault, FaultProxy
from kvtier.testing.seaweedfs import SeaweedFS
from kvtier.types import Status

LAYERS, PAGE, ROW, PAGES = 4, 16, 64, 200
LAYOUT = KvLayout.per_token(
    layers=LAYERS, planes=1, page_tokens=PAGE, heads=1, head_bytes=ROW, dtype="u1"
)
RECORD = 4096 + 4 * 16384
PATIENT_S = 30.0  # where a loaded machine must not make a test lie
prompt = ConnectorSuite.prompt


class Engine:
    """A process's tier over the bucket, with numpy pages attached."""

    def __init__(self, endpoint: str, root: Path, **changes: Any) -> None:
        bucket = {
            "kind": "s3",
            "url": f"s3://{SeaweedFS.bucket}{root}",
            "endpoint": endpoint,
            "capacity": changes.pop("capacity", 1 << 30),
            "timeout_s": changes.pop("timeout_s", PATIENT_S),
        }
        memory = {"kind": "memory", "capacity": 64 * RECORD}
        tiers = [memory, *changes.pop("between", []), bucket]
        self.tier = KVTier.open({"tiers": tiers, "ask_timeout_s": PATIENT_S, **changes})
        self.pages = np.zeros((LAYERS, PAGES, PAGE, ROW), dtype=np.uint8)
        kv = PagedKv(
            plane_addresses=np.array([layer.ctypes.data for layer in self.pages], np.uint64),
            page_count=PAGES,
            page_stride=PAGE * ROW,
            row_stride=ROW,
            col_stride=ROW,
            owner=self.pages,
        )
        self.space = self.tier.attach(Namespace(model="m", waves=4), LAYOUT, kv)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.tier.close()

    def store(self, tokens: list[int]) -> None:
        count = len(tokens) // PAGE
        kv = toy_kv(tokens, LAYERS, 1, ROW)[:, 0, : count * PAGE]
        self.pages[:, :count] = kv.reshape(LAYERS, count, PAGE, ROW)
        self.tier.store(self.space, tokens, range(count))
        assert self.tier.flush()

    def right(self, tokens: list[int]) -> int:
        """Look up, load and compare; tokens that came, all of them right."""
        hit = self.tier.lookup(self.space, tokens)
        self.pages[:] = 0xEE
        pages = list(range(100, 100 + hit.tokens // PAGE))
        result = self.tier.load(hit, pages).wait()
        self.tier.release(hit)
        assert result is not None
        self.outcomes = result.outcomes
        got = self.pages[:, pages].reshape(LAYERS, -1, ROW)[:, : result.tokens]
        assert np.array_equal(got, toy_kv(tokens, LAYERS, 1, ROW)[:, 0, : result.tokens])
        return result.tokens

    def stat(self) -> dict[str, Any]:
        stat: dict[str, Any] = self.tier.stat()["tiers"]["s3"]
        return stat

    def forget_memory(self) -> None:
        self.tier.cleanup(tier="memory")


@pytest.fixture
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.port) as proxy:
        yield proxy


def objects(server: SeaweedFS, root: Path) -> list[str]:
    client = boto3.client("s3", endpoint_url=server.endpoint)
    answer = client.list_objects_v2(Bucket=server.bucket, Prefix=str(root)[1:])
    client.close()
    return [entry["Key"] for entry in answer.get("Contents", [])]


STORER = """
import sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from test_s3_tier import Engine, prompt
with Engine(sys.argv[1], Path(sys.argv[2])) as engine:
    engine.store(prompt(1100))
"""


def test_another_process_finds_what_one_stored_without_a_list(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-P", "-c", STORER, proxy.endpoint, str(tmp_path), here]
    subprocess.run(command, check=True, timeout=60)
    with Engine(proxy.endpoint, tmp_path) as engine:
        proxy.heal()
        assert engine.right(prompt(1100)) == 1088
        assert not [path for _, path in proxy.requests if "list-type" in path]
        assert engine.stat()["chunks"] == 5
        asked = len(proxy.requests)
        engine.forget_memory()
        assert engine.right(prompt(1100)) == 1088, "what was found stays known"
        assert [method for method, _ in proxy.requests[asked:]] == ["GET"] * 5
        assert engine.right(prompt(1100)[:700]) == 512
        assert engine.right(prompt(1024, seed=2)) == 0


def test_a_run_ends_where_the_bucket_has_a_gap(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    with Engine(seaweedfs.endpoint, tmp_path) as first:
        first.store(prompt(9 * 256))
        keys, _ = first.space.keys_of(prompt(9 * 256))
        first.tier.hierarchy.tiers[1].backend.remove([keys[6]])
    with Engine(seaweedfs.endpoint, tmp_path) as second:
        assert second.right(prompt(9 * 256)) == 6 * 256


def test_what_is_absent_is_not_asked_for_again_at_once(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.asking.ABSENT_S", PATIENT_S)
    with Engine(proxy.endpoint, tmp_path) as engine:
        for _ in range(20):
            assert engine.tier.lookup(engine.space, prompt(1024)).tokens == 0
        assert len(proxy.requests) == 4
        engine.store(prompt(512))
        proxy.heal()
        assert engine.right(prompt(512)) == 512
        assert engine.right(prompt(600)) == 512
        assert proxy.requests == [], "all whole chunks are known"


def test_a_bucket_below_a_disk_gets_what_is_stored(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    def disk(name: str) -> dict[str, Any]:
        return {"kind": "posix", "path": str(tmp_path / name), "capacity": 1 << 30}

    with Engine(seaweedfs.endpoint, tmp_path, between=[disk("one")]) as first:
        first.store(prompt(1024))
        stat = first.tier.stat()["tiers"]
        assert (stat["posix"]["chunks"], stat["s3"]["chunks"]) == (4, 4)
        assert first.tier.stat()["leases"] == 0
        first.forget_memory()
        assert first.tier.lookup(first.space, prompt(1024)).tokens_by_tier() == {"posix": 1024}
    with Engine(seaweedfs.endpoint, tmp_path, between=[disk("two")]) as second:
        assert second.right(prompt(1024)) == 1024


# ---- whose objects they are


def test_capacity_counts_and_evicts_only_what_this_process_stored(
    seaweedfs: SeaweedFS, tmp_path: Path
) -> None:
    with Engine(seaweedfs.endpoint, tmp_path) as first:
        first.store(prompt(1024))
        assert first.stat()["used_bytes"] == 4 * RECORD
        with Engine(seaweedfs.endpoint, tmp_path, capacity=2 * RECORD) as second:
            assert second.right(prompt(1024)) == 1024
            assert (second.stat()["chunks"], second.stat()["used_bytes"]) == (4, 0)
            for seed in range(2, 6):
                second.store(prompt(512, seed=seed))
            assert (second.stat()["chunks"], second.stat()["used_bytes"]) == (6, 2 * RECORD)
            assert len(objects(seaweedfs, tmp_path)) == 6
        first.forget_memory()
        assert first.right(prompt(1024)) == 1024


def test_storing_what_another_process_stored_counts_for_nobody_twice(
    seaweedfs: SeaweedFS, tmp_path: Path
) -> None:
    with (
        Engine(seaweedfs.endpoint, tmp_path) as first,
        Engine(seaweedfs.endpoint, tmp_path) as second,
    ):
        first.store(prompt(1024))
        second.store(prompt(1024))
        assert (second.stat()["chunks"], second.stat()["used_bytes"]) == (4, 0)
        assert len(objects(seaweedfs, tmp_path)) == 4


def test_losing_the_prefix_here_takes_nothing_from_others(
    seaweedfs: SeaweedFS, tmp_path: Path
) -> None:
    with Engine(seaweedfs.endpoint, tmp_path) as first:
        first.store(prompt(1024))
    with Engine(seaweedfs.endpoint, tmp_path, write_back=False) as second:
        second.store(prompt(256))
        assert second.right(prompt(1024)) == 1024
        for seed in range(2, 40):
            second.store(prompt(512, seed=seed))
        assert second.tier.flush()
        assert len(objects(seaweedfs, tmp_path)) == 4
        assert second.right(prompt(1024)) == 1024
        second.tier.cleanup()
        assert len(objects(seaweedfs, tmp_path)) == 0, "unless a person wants it"


def test_what_was_found_is_forgotten_beyond_a_bound(
    seaweedfs: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hierarchy, "FOUND_MAX", 6)
    with Engine(seaweedfs.endpoint, tmp_path) as first:
        for seed in range(1, 5):
            first.store(prompt(1024, seed=seed))
    with Engine(seaweedfs.endpoint, tmp_path) as second:
        for seed in (1, 2, 3, 4, 1, 2):
            hit = second.tier.lookup(second.space, prompt(1024, seed=seed))
            assert hit.tokens == 1024
            second.tier.release(hit)
        assert second.stat()["chunks"] <= 8
        assert second.tier.flush()
        assert second.right(prompt(1024, seed=3)) == 1024
        assert len(objects(seaweedfs, tmp_path)) == 16


# ---- faults


def test_garbage_is_recomputed_and_taken_out(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    with Engine(seaweedfs.endpoint, tmp_path) as first:
        first.store(prompt(1024))
        keys, _ = first.space.keys_of(prompt(1024))
    client = boto3.client("s3", endpoint_url=seaweedfs.endpoint)
    name = next(name for name in objects(seaweedfs, tmp_path) if keys[2].hex() in name)
    client.put_object(Bucket=seaweedfs.bucket, Key=name, Body=b"\x5a" * RECORD)
    client.close()
    with Engine(seaweedfs.endpoint, tmp_path) as second:
        assert second.right(prompt(1024)) == 512
        assert second.outcomes[2].status is Status.CORRUPT
        assert second.tier.flush()
        assert name not in objects(seaweedfs, tmp_path)
        second.store(prompt(1024))
        assert name in objects(seaweedfs, tmp_path)
        second.forget_memory()
        assert second.right(prompt(1024)) == 1024


@pytest.mark.parametrize("fault", [Fault.TRUNCATED, Fault.GARBLED, Fault.ERROR])
def test_bytes_that_did_not_arrive_whole_are_never_served(
    proxy: FaultProxy, tmp_path: Path, fault: Fault
) -> None:
    with Engine(proxy.endpoint, tmp_path) as first:
        first.store(prompt(512))
    with Engine(proxy.endpoint, tmp_path, timeout_s=0.5) as second:
        assert second.tier.lookup(second.space, prompt(512)).tokens == 512
        proxy.inject(fault, wanted=lambda method, _: method == "GET")
        assert second.right(prompt(512)) == 0
        assert {outcome.status for outcome in second.outcomes} <= {Status.RETRY, Status.CORRUPT}
        proxy.heal()
        second.store(prompt(512))
        second.forget_memory()
        assert second.right(prompt(512)) == 512


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.RESET])
def test_a_bucket_out_of_reach_holds_up_no_lookup_and_no_store(
    proxy: FaultProxy, tmp_path: Path, fault: Fault
) -> None:
    with Engine(proxy.endpoint, tmp_path) as first:
        first.store(prompt(1024))
    settings = {"timeout_s": 1.0, "ask_timeout_s": 0.05, "close_timeout_s": 0.5}
    with Engine(proxy.endpoint, tmp_path, **settings) as second:
        proxy.inject(fault)
        begin_s = time.monotonic()
        for seed in range(2, 52):
            hit = second.tier.lookup(second.space, prompt(1024, seed=seed))
            assert hit.tokens == 0
        second.tier.store(second.space, prompt(256, seed=9), range(16))
        assert time.monotonic() - begin_s < 2.0, "at most a few lookups wait, and those shortly"
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < 15.0


def test_an_answer_that_comes_late_serves_the_next_lookup(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    with Engine(proxy.endpoint, tmp_path) as first:
        first.store(prompt(256))
    with Engine(proxy.endpoint, tmp_path, ask_timeout_s=1e-6) as second:
        assert second.tier.lookup(second.space, prompt(256)).tokens in (0, 256)
        ends_s = time.monotonic() + PATIENT_S
        while second.tier.lookup(second.space, prompt(256)).tokens == 0:
            assert time.monotonic() < ends_s
            time.sleep(0.01)  # the answer is on its way; nothing else tells of it
        assert second.right(prompt(256)) == 256


def test_a_bucket_may_come_up_after_the_tier(tmp_path: Path) -> None:
    server = SeaweedFS(tmp_path / "server")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in server.environ.items():
            environment.setenv(name, value)
        with Engine(server.endpoint, tmp_path, timeout_s=0.3) as engine:
            engine.store(prompt(512))  # its write-back fails and is counted
            assert engine.stat()["chunks"] == 0
            with server:
                engine.store(prompt(768))
                engine.tier.move(engine.space, prompt(768), to="s3")
                assert engine.right(prompt(768)) == 768
                assert engine.stat()["chunks"] == 3
