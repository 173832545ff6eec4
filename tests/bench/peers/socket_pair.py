"""A raw TCP stream between two processes, of as many bytes: ``socket_pair.py WORKLOAD``; see `pair`.

Bytes go in the order in which they lie, 4 MiB in a call: a limit, which nothing that has to put
them in place can ask of the kernel. Only ``write`` means something.
"""

from __future__ import annotations

import ctypes
import platform
import socket
import threading
from typing import Any

from pair import REGION_BYTES, Work, main

CALL_BYTES = 4 << 20


def _memory(work: Work) -> memoryview:
    return memoryview((ctypes.c_uint8 * REGION_BYTES).from_address(work.address)).cast("B")


class Target:
    def __init__(self, work: Work) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.offer = self._listening.getsockname()[1]
        self._memory = _memory(work)
        self._total = work.count * work.nbytes
        threading.Thread(target=self._receive, daemon=True).start()
        self._nothing = threading.Event()

    def poll(self) -> None:
        self._nothing.wait(0.001)

    def _receive(self) -> None:
        connection, _ = self._listening.accept()
        while True:
            got = 0
            while got < self._total:
                at = got % REGION_BYTES
                room = min(CALL_BYTES, REGION_BYTES - at, self._total - got)
                if (count := connection.recv_into(self._memory[at : at + room])) == 0:
                    return
                got += count
            connection.sendall(b"!")


class Initiator:
    def __init__(self, work: Work, offer: Any) -> None:
        self.version = f"Linux {platform.release()}"
        self._connection = socket.create_connection(("127.0.0.1", offer))
        self._memory = _memory(work)
        self._total = work.count * work.nbytes

    def run(self, op: str) -> None:
        for begin in range(0, self._total, CALL_BYTES):
            at = begin % REGION_BYTES
            self._connection.sendall(self._memory[at : at + CALL_BYTES])
        self._connection.recv(1)


if __name__ == "__main__":
    main(Target, Initiator)
