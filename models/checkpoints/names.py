"""The names that formats give to tensors, and the one place where names and shapes are checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from errors import CheckpointError
from models.checkpoints.storage import RowSlice, Stored
from models.config import ModelConfig

T = TypeVar("T")

# the file's module name -> ours; the names not listed are taken as they are (Meta's are ours)
HUGGINGFACE = {
    "embed_tokens": "tok_embeddings",
    "norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
GGUF = {
    "token_embd": "tok_embeddings",
    "output_norm": "norm",
    "output": "output",
    "attn_norm": "attention_norm",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_output": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}

_WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.|model\.)+")  # torch.compile, DataParallel, HF and torchchat
_PARTS = re.compile(r"^(?:(?:layers|blk)\.(?P<layer>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)$")
# what can be computed, and is not a weight
_BUFFERS = re.compile(
    r"(?:^|\.)(?:freqs_cis|freqs_cos|freqs_sin|freqs|inv_freq|attn_rot_embd|(?:causal_)?mask|position_ids|[kv]_cache)$"
)


def rename(path: Path, stored: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """`stored` under our names, buffers left out. `names` is HUGGINGFACE, GGUF or {} for Meta's."""
    renamed: dict[str, T] = {}
    for raw, tensor in stored.items():
        bare = _WRAPPERS.sub("", raw)
        if _BUFFERS.search(bare):
            continue
        parts = _PARTS.match(bare)
        name = bare
        if parts is not None:
            prefix = "" if parts["layer"] is None else f"layers.{int(parts['layer'])}."
            name = f"{prefix}{names.get(parts['module'], parts['module'])}.{parts['kind']}"
        if name in renamed:
            raise CheckpointError(path, f"has tensor {name} twice (the second time as {raw})")
        renamed[name] = tensor
    return renamed


def is_huggingface(stored: Mapping[str, object]) -> bool:
    """Whether names are Hugging Face's, whose q and k rows are in half-split RoPE order."""
    return any(name.endswith(("embed_tokens.weight", ".self_attn.q_proj.weight")) for name in stored)


def shapes_of(tensors: Mapping[str, Stored]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def fit(path: Path, tensors: Mapping[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """Exactly what `config.tensor_shapes()` asks for, in its order, out of tensors under our names.

    Splits wqkv and drops the copy of a tied output. Raises CheckpointError naming the tensor, with expected and found.
    """
    _check_heads(path, config)
    found = _split_qkv(path, dict(tensors), config)
    if config.tied:
        found.pop("output.weight", None)
    expected = config.tensor_shapes()
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(path, f"tensor {missing[0]}{more} is missing; expected shape {expected[missing[0]]}")
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CheckpointError(path, f"tensor {name} has shape {found[name].shape}, expected {shape}")
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise CheckpointError(
            path,
            f"tensor {extra[0]} {found[extra[0]].shape} ({len(extra)} such) has no place in a "
            f"{config.architecture} model of {config.n_layers} layers",
        )
    return {name: found[name] for name in expected}


def precision_of(tensors: Mapping[str, Stored]) -> str:
    """How most of the bytes are stored."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.kind] += tensor.nbytes
    return sizes.most_common(1)[0][0]


def _check_heads(path: Path, config: ModelConfig) -> None:
    if config.n_kv_heads <= 0 or config.n_heads % config.n_kv_heads != 0:
        raise CheckpointError(path, f"{config.n_heads} heads can't share {config.n_kv_heads} key/value heads evenly")
    if config.head_dim <= 0 or config.head_dim % 2 != 0:
        raise CheckpointError(path, f"head_dim {config.head_dim} must be even and positive for RoPE")
    if config.context_length <= 0 or config.hidden_dim <= 0:
        raise CheckpointError(
            path, f"context length {config.context_length} or hidden size {config.hidden_dim} is not positive"
        )


def _split_qkv(path: Path, tensors: dict[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """Replace each fused wqkv (q's rows, then k's, then v's) by its three parts."""
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    for name in [name for name in tensors if ".wqkv." in name]:
        whole = tensors.pop(name)
        if whole.shape[0] != q + 2 * kv:
            raise CheckpointError(path, f"tensor {name} has shape {whole.shape}, expected {q + 2 * kv} rows")
        for part, start, stop in (("wq", 0, q), ("wk", q, q + kv), ("wv", q + kv, q + 2 * kv)):
            tensors[name.replace("wqkv", part)] = RowSlice(whole, start, stop)
    return tensors
