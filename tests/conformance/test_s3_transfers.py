from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import boto3
import numpy as np
import pytest

from kvtier import Agent, BackendUnavailable, Op
from kvtier._core import Completions
from kvtier.backends.s3_transfers import S3Transfers
from kvtier.testing.fault_proxy import Fault, FaultProxy
from kvtier.testing.seaweedfs import SeaweedFS
from kvtier.testing.transfer_scene import Place
from kvtier.testing.transfer_suite import TransferSuite
from kvtier.types import Descriptor, Region, RegionKind, Status


class TestObjects(TransferSuite):
    writes_whole_regions = True
    model_examples = 8
    numbers: ClassVar[itertools.count[int]] = itertools.count()

    @pytest.fixture(autouse=True)
    def _server(self, seaweedfs: SeaweedFS) -> Iterator[None]:
        self.server = seaweedfs
        self.client: Any = boto3.client("s3", endpoint_url=seaweedfs.endpoint)
        yield
        self.client.close()

    def make(self, completions: Completions, root: Path) -> S3Transfers:
        return S3Transfers(completions, endpoint=self.server.endpoint)

    def remote(self, nbytes: int, root: Path) -> Place:
        name = f"{str(root)[1:]}/{next(self.numbers)}"
        self.client.put_object(Bucket=self.server.bucket, Key=name, Body=bytes(nbytes))
        return Place(Region(RegionKind.OBJ, 0, nbytes), f"s3://{self.server.bucket}/{name}")

    def read_remote(self, place: Place, offset: int, nbytes: int) -> bytes:
        return self._whole(place)[offset : offset + nbytes]

    def write_remote(self, place: Place, offset: int, data: bytes) -> None:
        whole = bytearray(self._whole(place))
        whole[offset : offset + len(data)] = data
        self.client.put_object(**self._name(place), Body=bytes(whole))

    def _name(self, place: Place) -> dict[str, str]:
        bucket, _, name = place.source.removeprefix("s3://").partition("/")
        return {"Bucket": bucket, "Key": name}

    def _whole(self, place: Place) -> bytes:
        data: bytes = self.client.get_object(**self._name(place))["Body"].read()
        return data


@pytest.fixture
def agent(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", seaweedfs.endpoint)
    with Agent("objects", backends=["s3"]) as agent:
        yield agent


def move(
    agent: Agent,
    op: Op,
    memory: Region,
    place: Region,
    nbytes: int = 0,
    offset: int = 0,
    deadline_s: float = 60.0,
) -> Any:
    nbytes = nbytes or memory.nbytes
    transfer = agent.prepare(
        op, [Descriptor(memory, 0, nbytes)], [Descriptor(place, offset, nbytes)]
    )
    transfer.post(deadline_s=deadline_s)
    assert transfer.wait()
    return transfer.outcomes()


def test_an_agent_writes_an_object_and_reads_it_scattered(
    agent: Agent, seaweedfs: SeaweedFS, tmp_path: Path
) -> None:
    url = f"s3://{seaweedfs.bucket}{tmp_path}/object"
    pages = np.random.default_rng(1).integers(0, 256, (100, 65536), dtype=np.uint8)
    right = pages.copy()
    memory = agent.register(pages)
    written = agent.register(url, nbytes=pages.nbytes)
    assert all(outcome.ok for outcome in move(agent, Op.WRITE, memory, written))
    found = agent.register(url)
    assert found.nbytes == pages.nbytes
    pages[:] = 0
    order = np.random.default_rng(2).permutation(100)
    transfer = agent.prepare(
        Op.READ,
        [Descriptor(memory, int(page) * 65536, 65536) for page in order],
        [Descriptor(found, number * 65536, 65536) for number in range(100)],
    )
    transfer.post(deadline_s=60)
    assert transfer.wait()
    assert all(outcome.ok for outcome in transfer.outcomes())
    assert np.array_equal(pages[order], right)


def test_neighbours_are_read_by_one_request(
    seaweedfs: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(seaweedfs.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with Agent("objects", backends=["s3"]) as agent:
            memory = agent.register(bytearray(100 * 4096))
            place = agent.register(f"s3://{seaweedfs.bucket}{tmp_path}/x", nbytes=100 * 4096)
            assert all(outcome.ok for outcome in move(agent, Op.WRITE, memory, place))
            proxy.heal()
            transfer = agent.prepare(
                Op.READ,
                [Descriptor(memory, number * 4096, 4096) for number in range(99, -1, -1)],
                [Descriptor(place, number * 4096, 4096) for number in range(100)],
            )
            transfer.post(deadline_s=60)
            assert transfer.wait()
            assert len(proxy.requests) == 1
            proxy.inject(Fault.HANG)
            outcomes = move(agent, Op.READ, memory, place, deadline_s=0.3)
            assert {outcome.status for outcome in outcomes} == {Status.RETRY}
            proxy.heal()
            proxy.inject(Fault.TRUNCATED)
            outcomes = move(agent, Op.READ, memory, place, deadline_s=0.3)
            assert {outcome.status for outcome in outcomes} == {Status.RETRY}


def test_what_is_not_there_or_too_short_is_told(
    agent: Agent, seaweedfs: SeaweedFS, tmp_path: Path
) -> None:
    memory = agent.register(bytearray(8192))
    url = f"s3://{seaweedfs.bucket}{tmp_path}/x"
    with pytest.raises((ValueError, BackendUnavailable), match="no such object"):
        agent.register(url)
    place = agent.register(url, nbytes=8192)
    (outcome,) = move(agent, Op.READ, memory, place)
    assert outcome.status is Status.MISSING
    assert move(agent, Op.WRITE, memory, place, nbytes=4096)[0].ok
    (outcome,) = move(agent, Op.READ, memory, place)
    assert (outcome.status, "ends after 4096" in outcome.detail) == (Status.MISSING, True)
    with pytest.raises(BackendUnavailable, match="is written whole"):
        move(agent, Op.WRITE, memory, place, nbytes=4096, offset=4096)


@pytest.mark.parametrize("source", ["s3://bucket", "s3://B/x", "http://bucket/x"])
def test_what_is_no_object_is_refused_with_a_reason(agent: Agent, source: str) -> None:
    with pytest.raises((ValueError, BackendUnavailable), match=r"bucket|s3://"):
        agent.register(source, nbytes=100)
