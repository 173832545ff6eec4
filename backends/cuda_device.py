"""A CUDA device as this process uses it: opened once, with what the environment says about it."""

from __future__ import annotations

import os
import threading

from kvtier._core import CudaDevice
from kvtier.errors import BackendUnavailable

MODES = ("auto", "off", "jit")
CTAS_MAX = 1024

_lock = threading.Lock()
_devices: dict[int, tuple[CudaDevice, int]] = {}


def take_device(ordinal: int) -> CudaDevice:
    """The device, shared by all of the process who take it; give it back with `give_back`.

    `KVTIER_CUDA` is ``auto``, ``off`` to use none, or ``jit`` to compile the kernels here instead of
    taking those that are built in. `KVTIER_CUDA_CTAS` is how many CTAs a copy kernel may have.

    Raises:
        BackendUnavailable: there is no driver or no such device, or it is switched off.
    """
    mode = os.environ.get("KVTIER_CUDA", "auto")
    if mode not in MODES:
        raise BackendUnavailable(f"KVTIER_CUDA is {mode!r}, expected one of {', '.join(MODES)}")
    if mode == "off":
        raise BackendUnavailable("CUDA is switched off (KVTIER_CUDA=off)")
    ctas = os.environ.get("KVTIER_CUDA_CTAS", "0")
    if not ctas.isdecimal() or int(ctas) > CTAS_MAX:
        raise BackendUnavailable(
            f"KVTIER_CUDA_CTAS is {ctas!r}, expected 1 to {CTAS_MAX}, or 0 to leave it to kvtier"
        )
    with _lock:
        device, users = _devices.get(ordinal, (None, 0))
        if device is None:
            try:
                device = CudaDevice(ordinal, mode, sm_budget=int(ctas))
            except OSError as error:
                raise BackendUnavailable(f"CUDA device {ordinal}: {error.strerror}") from error
        _devices[ordinal] = device, users + 1
        return device


def give_back(device: CudaDevice) -> None:
    """One user less; the last one closes it."""
    with _lock:
        held, users = _devices[device.ordinal]
        assert held is device, "what is given back was taken"
        if users > 1:
            _devices[device.ordinal] = device, users - 1
            return
        del _devices[device.ordinal]
    device.close()
