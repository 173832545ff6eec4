"""kvtier as a KV connector of vLLM (V1 connector API, vLLM 0.32 and later).

vLLM finds the class by its place or by its name:

    --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_connector_extra_config": {"tiers": [...], "vllm": {"load": "auto"}}}'

The extra configuration is kvtier's own (`kvtier.config`), with this connector's settings under
``vllm`` (`kvtier.connectors.vllm.settings`). Installed, the module path may be left out: `register` is
an entry point of the group ``vllm.general_plugins``.

Importing this package imports neither vLLM nor torch; the class does, when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier import KVTier

__all__ = ["KVTierConnector", "open_tiers", "register"]


def register() -> None:
    """Tell vLLM's connector factory the name; vLLM calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVTierConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KVTierConnector", "kvtier.connectors.vllm", "KVTierConnector"
        )


def open_tiers() -> list[KVTier]:
    """The tiers of this process's vLLM engines, for the control API: `stat`, `events`, `cleanup`.

    They are vLLM's: whoever closes one costs its engine every later hit.
    """
    from kvtier.connectors.vllm.engine import open_tiers

    return open_tiers()


def __getattr__(name: str) -> Any:
    if name == "KVTierConnector":
        from kvtier.connectors.vllm.connector import KVTierConnector

        return KVTierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
