"""The process that the doctor's checks run in: ``python -m kvtier.doctor.child FD NAME...``."""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from kvtier.doctor.report import Asked
from kvtier.doctor.runner import run_check


def main() -> None:
    """Check each name in order and write what was found to the descriptor, a line each."""
    logging.disable(logging.CRITICAL)  # findings say it
    asked = msgspec.json.decode(os.environ["KVTIER_DOCTOR_ASKED"], type=Asked)
    target = int(sys.argv[1])
    os.write(target, b"ready\n")  # from here on the time is the checks' own
    for name in sys.argv[2:]:
        os.write(target, msgspec.json.encode(run_check(name, asked)) + b"\n")
    os._exit(0)  # without waiting for what hangs, or for libraries that tidy up


if __name__ == "__main__":
    main()
