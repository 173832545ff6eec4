"""The other agent of a measurement between processes: ``python -m kvtier.doctor.peer NAME BYTES``."""

from __future__ import annotations

import sys

from kvtier.agent import Agent
from kvtier.shared_pool import SharedPool


def main() -> None:
    """Offer memory through the backend, say the metadata, and stay until the input ends."""
    name, nbytes = sys.argv[1], int(sys.argv[2])
    with SharedPool(nbytes, prefault=False) as pool, Agent(backends=[name]) as agent:
        pool.view(0, nbytes)[:] = bytes(nbytes)
        agent.register(pool)
        # Libraries talk on standard output too: the word tells this line from theirs.
        sys.stdout.write(f"metadata {agent.metadata().hex()}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
