"""Waiting on the host for what a device was told to do: bounded, since a device can hang."""

from __future__ import annotations

from kvtier.device import DeviceMove

DEVICE_WAIT_S = 30.0  # a device that needs longer for a few GB is not coming back


def wait_for(move: DeviceMove) -> None:
    """Return when it is done.

    Raises:
        OSError: the device failed, or does not answer.
    """
    if not move.wait(DEVICE_WAIT_S):
        raise TimeoutError(f"the device did not finish a copy within {DEVICE_WAIT_S:g} s")
