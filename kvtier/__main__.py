"""The command ``kvtier``, also ``python -m kvtier``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvtier.doctor import Asked, as_text, examine


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; gives the exit status."""
    parser = argparse.ArgumentParser(prog="kvtier", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="what works on this machine, how fast, and why the rest does not",
        description="Says what works on this machine, how fast, and why the rest does not. The "
        "exit status is 0 whatever is found: only a wrong command line is an error.",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of text")
    doctor.add_argument("--quick", action="store_true", help="rougher figures, in 5 s")
    doctor.add_argument("--folder", default=".", help="where a disk tier would lie (default: here)")
    doctor.add_argument("--s3-url", default="", help="an object store to try: s3://bucket/prefix")
    doctor.add_argument("--endpoint", default="", help="its address, if it is not Amazon's")
    said = parser.parse_args(arguments)
    report = examine(
        Asked(folder=said.folder, s3_url=said.s3_url, endpoint=said.endpoint, quick=said.quick)
    )
    print(report.as_json() if said.json else as_text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
