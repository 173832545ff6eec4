"""Records to and from an object store, against a bare loop of boto3 over the same objects.

The server is SeaweedFS on this machine, so it takes part of the same processors: GB/s say how both
clients get on beside it, and the client's own processor time, which is all that is counted here, says
what they cost. The loop is boto3 used well: bodies are read into memory that is there already, with
neither checksums nor signatures over what is sent.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import numpy as np
from botocore.config import Config
from llama import as_array, huge_memory
from result import Result, Setting, Work, bandwidth, progress, take_turns

from kvtier.backends.s3 import S3Backend, S3Options
from kvtier.errors import KvtierError
from kvtier.testing.seaweedfs import SeaweedFS
from kvtier.types import ChunkKey

OBJECT_BYTES = 32 << 20
IN_FLIGHT = (1, 4, 16)
OBJECTS_MAX = 16
PUT_OBJECTS_MIN = 4  # of one round: the server stores 0.2 GB/s
GET_ROUNDS, PUT_ROUNDS = 11, 5
SLICE_BYTES = 1 << 20  # of one `readinto` of boto3's body
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(OBJECTS_MAX)]


def run(wanted: set[str], setting: Setting) -> Iterator[Result]:
    with (
        tempfile.TemporaryDirectory(dir=setting.folder) as scratch,
        SeaweedFS(Path(scratch)) as server,
    ):
        os.environ.update(server.environ)
        bench = Bench(server)
        for name in sorted(wanted):
            for in_flight in IN_FLIGHT:
                progress(f"  {name}, {in_flight} in flight")
                yield (bench.get if name == "s3_get" else bench.put)(name, in_flight)


class Bench:
    """Objects on the server, and memory for as many."""

    def __init__(self, server: SeaweedFS) -> None:
        self._bucket = server.bucket
        self._endpoint = server.endpoint
        memory = as_array(huge_memory(OBJECTS_MAX * OBJECT_BYTES), OBJECTS_MAX * OBJECT_BYTES)
        self._arrays = memory.reshape(OBJECTS_MAX, OBJECT_BYTES)
        self._views = [memoryview(array) for array in self._arrays]
        self._right = np.random.default_rng(3).integers(0, 256, OBJECT_BYTES, np.uint8)
        self._source = bytearray(self._right)  # boto3 takes no memoryview
        self._boto = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            config=Config(
                max_pool_connections=OBJECTS_MAX,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"payload_signing_enabled": False},
            ),
        )
        for number in range(OBJECTS_MAX):
            self._boto_put(self._name("get", number))

    def get(self, bench: str, in_flight: int) -> Result:
        names = [self._name("get", number) for number in range(OBJECTS_MAX)]
        with self._open("get", in_flight) as backend, ThreadPoolExecutor(in_flight) as threads:
            ours = Work(lambda: _all_ok(backend.get(KEYS, self._views), OBJECTS_MAX))
            theirs = Work(lambda: _drain(threads.map(self._boto_get, names, self._views)))
            times = take_turns({"kvtier": ours, "boto3": theirs}, GET_ROUNDS)
            for work in (ours, theirs):
                self._arrays[:] = 0
                work.run()
                if not all(np.array_equal(array, self._right) for array in self._arrays):
                    raise KvtierError("what was read is not what was stored")
        return self._result(bench, in_flight, OBJECTS_MAX, times, GET_ROUNDS)

    def put(self, bench: str, in_flight: int) -> Result:
        count = max(PUT_OBJECTS_MIN, in_flight)
        names = [self._name("boto", number) for number in range(count)]
        sources = [memoryview(self._source)] * count
        with self._open("put", in_flight) as backend, ThreadPoolExecutor(in_flight) as threads:

            def remove() -> None:
                backend.remove(KEYS[:count])
                for name in names:
                    self._boto.delete_object(Bucket=self._bucket, Key=name)

            ours = Work(lambda: _all_ok(backend.put(KEYS[:count], sources), count), remove)
            theirs = Work(lambda: _drain(threads.map(self._boto_put, names)), remove)
            times = take_turns({"kvtier": ours, "boto3": theirs}, PUT_ROUNDS)
            remove()
            ours.run()
            self._arrays[:] = 0
            backend.get(KEYS[:count], self._views[:count])
            if not all(np.array_equal(array, self._right) for array in self._arrays[:count]):
                raise KvtierError("what is stored is not what was sent")
            remove()
        return self._result(bench, in_flight, count, times, PUT_ROUNDS)

    def _open(self, folder: str, in_flight: int) -> S3Backend:
        url = f"s3://{self._bucket}/{folder}"
        return S3Backend(
            S3Options(url=url, endpoint=self._endpoint, concurrency=in_flight, timeout_s=60.0)
        )

    def _name(self, folder: str, number: int) -> str:
        """As the backend calls it."""
        name = KEYS[number].hex()
        return f"{folder}/{name[:2]}/{name}.kvc"

    def _boto_put(self, name: str) -> None:
        self._boto.put_object(Bucket=self._bucket, Key=name, Body=self._source)

    def _boto_get(self, name: str, target: memoryview) -> None:
        body = self._boto.get_object(Bucket=self._bucket, Key=name)["Body"]
        at = 0
        while count := body.readinto(target[at : at + SLICE_BYTES]):
            at += count
        if at != OBJECT_BYTES:
            raise KvtierError(f"boto3 read {at} bytes")

    @staticmethod
    def _result(bench: str, in_flight: int, count: int, times: dict, rounds: int) -> Result:
        nbytes = count * OBJECT_BYTES
        return bandwidth(
            bench,
            nbytes,
            times["kvtier"],
            times["boto3"].wall_s,
            "a bare loop of boto3 over the same objects",
            rounds,
            {
                "in_flight": in_flight,
                "limit_cpu_s_per_gb": round(times["boto3"].cpu_s / nbytes * 1e9, 3),
            },
        )


def _drain(results: Iterator[None]) -> None:
    for _ in results:
        pass


def _all_ok(outcomes: list, count: int) -> None:
    if sum(outcome.ok and outcome.nbytes == OBJECT_BYTES for outcome in outcomes) != count:
        raise KvtierError(f"not all moved: {outcomes}")
