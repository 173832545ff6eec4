"""Who a request's KV belongs to: the model's and the request's part of a chunk's name.

Two requests may share a chunk only if everything that changes K or V is equal. What cannot be
known (prompt embeddings, a media item without a hash) is never guessed: such a request is left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier import ConfigError, Extra, Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    from kvtier.connectors.vllm.settings import VllmSettings

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLES = 256  # per file: a change of one weight in fifty escapes them once in 175
_SAMPLE_BYTES = 4096

# What Hugging Face writes into a config without any effect on K or V.
_VOLATILE = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"}


def model_namespace(vllm_config: VllmConfig, settings: VllmSettings) -> Namespace:
    """The namespace of the base model without a tenant.

    Raises:
        ConfigError: K and V depend on something that changes from start to start.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales gives each start its own scales, so cached KV would not fit"
        )
    config = {
        name: value
        for name, value in model.hf_config.to_diff_dict().items()
        if name not in _VOLATILE
    }
    extra = [
        ("config", _digest(json.dumps(config, sort_keys=True, default=str).encode())),
        ("dtype", str(model.dtype)),
        ("quantization", str(model.quantization)),
        ("load_format", str(vllm_config.load_config.load_format)),
    ]
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        extra.append(("draft", _weights(draft.model, draft.revision)))
    return Namespace(
        model=settings.model or _weights(model.model, model.revision),
        revision=str(model.revision or ""),
        dtype=str(cache.cache_dtype),
        chunk_tokens=settings.chunk_tokens,
        extra=tuple(extra),
    )


def is_knowable(request: Request) -> bool:
    """Whether token ids and the request's tenant, adapter and media say all about its KV."""
    return not (
        request.prompt_embeds is not None
        or request.prompt_is_token_ids is not None
        or request.pooling_params is not None
        or request.resumable  # a streaming session takes tokens back
        or any(not feature.identifier for feature in request.mm_features)
        or (request.lora_request is not None and request.lora_request.load_inplace)
    )


def request_extras(request: Request) -> tuple[Extra, ...]:
    """Media behind placeholder tokens."""
    return tuple(
        Extra(
            feature.mm_position.offset,
            feature.mm_position.offset + feature.mm_position.length,
            hashlib.sha256(feature.identifier.encode()).digest(),
        )
        for feature in request.mm_features
    )


class Adapters:
    """Identities of LoRA adapters; each folder's files are read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], str] = {}

    def identity(self, adapter: LoRARequest | None) -> str:
        """Empty for the base model."""
        if adapter is None:
            return ""
        key = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        if key not in self._known:
            self._known[key] = f"{adapter.lora_name} {_weights(adapter.lora_path, None)}"
        return self._known[key]


def _weights(name: str, revision: str | None) -> str:
    """Names weights by their content where the files can be found, else by their name.

    A path says nothing: other weights may lie there tomorrow. Reading everything would take minutes
    for a large model, so files are sampled; a model hub's snapshot names each file by its hash.
    """
    folder = _folder(name, revision)
    if folder is None:
        return f"{name}@{revision or ''}"
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix not in _WEIGHTS or not file.is_file():
            continue
        digest.update(f"{file.relative_to(folder)}|{file.stat().st_size}|".encode())
        blob = file.resolve()
        if file.is_symlink() and len(blob.name) == 64:
            digest.update(blob.name.encode())
        else:
            _sample(blob, digest)
    return "weights " + digest.hexdigest()


def _folder(name: str, revision: str | None) -> Path | None:
    if os.path.isdir(name):
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not a hub's model: the name has to do
        return None


def _sample(file: Path, digest: Any) -> None:
    size = file.stat().st_size
    last = max(0, size - _SAMPLE_BYTES)
    offsets = sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)})
    with file.open("rb") as stream:
        for offset in offsets:
            stream.seek(offset)
            digest.update(stream.read(_SAMPLE_BYTES))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
