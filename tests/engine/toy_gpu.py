"""vLLM's CPU backend as if it were a GPU: its pages are a toy device's, in the order of a stream.

What vLLM computes is done when a hook is called, where a GPU would only have been told. So the hooks
after which a GPU's stream would wait for kvtier let the host wait for that stream here: whatever
kvtier forgot to put in order is then read, or overwritten, too early.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvtier import DevicePlace, KVTier
from kvtier.connectors.vllm import pages
from kvtier.connectors.vllm.connector import KVTierConnector
from kvtier.testing.toy_device import ToyDevice, ToyStreams

STREAMS = ToyStreams(seed=11)
STREAM = STREAMS.create()
_open = KVTier.open


class ToyGpuConnector(KVTierConnector):
    """Sees the CPU's pages as those of a device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        KVTier.open = partial(_open, devices={"toy": lambda _: ToyDevice(STREAMS)})  # type: ignore[method-assign]
        pages._place = lambda tensor: DevicePlace("toy", 0, lambda: STREAM)
        super().__init__(*args, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        STREAMS.synchronize(STREAM)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        super().handle_preemptions(kv_connector_metadata)
        STREAMS.synchronize(STREAM)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        STREAMS.synchronize(STREAM)
