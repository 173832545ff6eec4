"""vLLM's KV tensors as kvtier sees them: one opaque plane per layer, addressed through strides.

vLLM hands out one view ``[block, head, token, content]`` per layer. Its order in memory is a choice
of the backend (layers or blocks may be outermost), so nothing here assumes contiguity: the page
stride is the view's. Inside a page the CPU backends pack K and V as their kernels like, over the
whole page, so only whole pages are copied and the packing is a part of the layout's fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier import ConfigError, DevicePlace, KvLayout, LayoutMismatch, PagedKv
from kvtier.arrays import stream_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class Pages:
    """The engine's KV memory, described for `KVTier.attach`."""

    layout: KvLayout
    kv: PagedKv
    layer_of: dict[str, int]
    """vLLM's layer name to the layer's number; layers that share memory share the number."""
    tensors: Sequence[torch.Tensor]
    """One view a layer, by number."""

    def read_page(self, page: int) -> bytes:
        """A page of all layers as vLLM's own views show it, for the proof of the layout."""
        import torch

        return b"".join(
            tensor.as_strided(
                (tensor[0].numel(),), (1,), tensor.storage_offset() + page * tensor.stride(0)
            )
            .view(torch.uint8)
            .cpu()
            .numpy()
            .tobytes()
            for tensor in self.tensors
        )


def page_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens in one of vLLM's blocks.

    Raises:
        ConfigError: the model keeps more than one kind of KV, or not all of it.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        raise ConfigError(
            f"this model's KV cache has the groups {', '.join(kinds) or 'none'}; kvtier caches models "
            "of one group of full attention (for models with sliding windows, start vLLM with "
            "--disable-hybrid-kv-cache-manager)"
        )
    return int(groups[0].kv_cache_spec.block_size)


def describe_pages(
    kv_caches: Mapping[str, torch.Tensor], tokens: int, page_count: int, packing: str
) -> Pages:
    """Layout and addresses of the registered tensors; pages hold `tokens` tokens.

    Raises:
        LayoutMismatch: the tensors are not equal, neither in host memory nor on one CUDA device, or
            a page of one layer is not one piece.
    """
    if not kv_caches:
        raise LayoutMismatch("vLLM registered no KV tensors")
    layer_of: dict[str, int] = {}
    number_at: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    for name, tensor in kv_caches.items():
        if not hasattr(tensor, "data_ptr"):
            raise LayoutMismatch(f"layer {name} keeps {type(tensor).__name__}, not one tensor")
        if tensor.device.type not in ("cpu", "cuda"):
            raise LayoutMismatch(
                f"layer {name} lies on {tensor.device}: kvtier serves KV in host memory (vLLM's CPU "
                "backend) and on CUDA devices"
            )
        if tensor.data_ptr() not in number_at:  # else a layer that reuses another's KV
            number_at[tensor.data_ptr()] = len(tensors)
            tensors.append(tensor)
        layer_of[name] = number_at[tensor.data_ptr()]
    if len(devices := {tensor.device for tensor in tensors}) != 1:
        raise LayoutMismatch(f"layers on {len(devices)} devices: {sorted(map(str, devices))}")
    shapes = {(tuple(t.shape), t.stride(), t.dtype) for t in tensors}
    if len(shapes) != 1:
        raise LayoutMismatch(
            f"layers differ in shape, strides or dtype: {sorted(map(str, shapes))}"
        )
    shape, strides, dtype = shapes.pop()
    item = tensors[0].element_size()
    page_bytes = int(np.prod(shape[1:])) * item
    if shape[0] != page_count:
        raise LayoutMismatch(f"tensors of {shape[0]} blocks, vLLM speaks of {page_count}")
    if not _is_one_piece(shape[1:], strides[1:]):
        raise LayoutMismatch(
            f"a block of shape {tuple(shape[1:])} with strides {tuple(strides[1:])} is not one piece "
            "of memory; choose another order, such as VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    layout = KvLayout.opaque(
        layers=len(tensors),
        page_tokens=tokens,
        page_bytes=page_bytes,
        dtype=str(dtype).removeprefix("torch."),
        packing=f"{packing}/{_order(shape[1:], strides[1:])}",
    )
    kv = PagedKv(
        plane_addresses=np.array([t.data_ptr() for t in tensors], dtype=np.uint64),
        page_count=page_count,
        page_stride=strides[0] * item,
        owner=tensors,
        place=_place(tensors[0]),
    )
    return Pages(layout, kv, layer_of, tensors)


def _place(tensor: torch.Tensor) -> DevicePlace | None:
    if tensor.device.type == "cpu":
        return None
    return DevicePlace("cuda", tensor.device.index or 0, stream_of(tensor))


def packing_name(vllm_config: VllmConfig, layer: str, tensor: torch.Tensor) -> str:
    """Names how the attention backend packs a page: its own name, its instruction set, and proof.

    The proof is the hash of a page that the backend fills with known tokens: it changes with the
    packing and with nothing else, so chunks outlive an update of vLLM that leaves the packing alone. A
    backend that cannot be asked this way is trusted only within one version of vLLM.
    """
    import vllm

    module = vllm_config.compilation_config.static_forward_context[layer]
    backend = module.get_attn_backend().get_name()
    isa = getattr(module, "isa", "")
    try:
        proof = _packing_proof(module, tensor)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        proof = f"vllm {vllm.__version__}"
    return f"vllm-{tensor.device.type}/{backend}/{isa}/{proof}"


def _packing_proof(module: Any, tensor: torch.Tensor) -> str:
    import torch

    _, heads, tokens, content = tensor.shape
    size = content // 2
    device = tensor.device
    page = torch.zeros((2, heads, tokens, content), dtype=tensor.dtype, device=device)
    dtype = module.dtype if hasattr(module, "dtype") else torch.get_default_dtype()
    # Small integers: exact in every dtype, also as fp8, and different along each axis.
    key = torch.arange(tokens * heads * size, device=device).reshape(tokens, heads, size) % 13
    slots = torch.arange(tokens, 2 * tokens, device=device)  # page 1, in order
    module.impl.do_kv_cache_update(module, key.to(dtype), (key % 7 + 1).to(dtype), page, slots)
    if not page[1].view(torch.uint8).any() or page[0].view(torch.uint8).any():
        raise ValueError("the backend did not fill the page it was told to")
    return hashlib.sha256(page[1].view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def _order(shape: Sequence[int], strides: Sequence[int]) -> str:
    """The extents of a page's axes as they lie in memory, outermost first: H2xN16xC8."""
    axes = sorted(zip(strides, shape, "HNC", strict=True), reverse=True)
    return "x".join(f"{axis}{extent}" for _, extent, axis in axes if extent > 1)


def _is_one_piece(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True
