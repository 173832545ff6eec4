"""Hand-over of a request from prefill to decode: layer by layer, while the prefill still computes.

The public names; `docs/handover.md` has an example. A prefill rank has a `HandoverSender`, a decode
rank a `HandoverReceiver`. Page sizes, orders of dimensions and numbers of ranks may differ.
"""

from kvtier.geometry import Shard
from kvtier.handover_protocol import HandoverResult, HandoverStatus
from kvtier.handover_receiver import HandoverReceiver, Offer, Source
from kvtier.handover_sender import HandoverSender, Push

__all__ = [
    "HandoverReceiver",
    "HandoverResult",
    "HandoverSender",
    "HandoverStatus",
    "Offer",
    "Push",
    "Shard",
    "Source",
]
