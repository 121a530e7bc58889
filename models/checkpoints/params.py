"""ModelConfig from Meta's params.json, torchchat's params and TinyLlamas' `model_args`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from errors import CheckpointError
from models.config import ModelConfig, RopeScaling

logger = logging.getLogger(__name__)

T = TypeVar("T", int, float, bool)


class Fields:
    """A JSON object (or dict) of settings, read with type checks. Errors name `path` and the key."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def get(self, kind: type[T], *keys: str) -> T | None:
        """The first of `keys` that is present and not null."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                return kind(value)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise CheckpointError(self.path, f"{key} must be {kind.__name__}, got {value!r}")
            return value
        return None

    def need(self, kind: type[T], *keys: str) -> T:
        value = self.get(kind, *keys)
        if value is None:
            raise CheckpointError(self.path, f"{keys[0]} is missing")
        return value

    def count(self, *keys: str) -> int:
        """A size that must be there and positive."""
        value = self.need(int, *keys)
        if value <= 0:
            raise CheckpointError(self.path, f"{keys[0]} must be positive, got {value}")
        return value

    def either(self, default: T, *keys: str) -> T:
        value = self.get(type(default), *keys)
        return default if value is None else value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it is anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"can't be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"must hold a JSON object, not a {type(value).__name__}")
    return value


def config_from_params(path: Path, params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """`params` came from `path`; `shapes` are the file's tensors by canonical name, for what params leave unsaid."""
    fields = Fields(path, params)
    dim, n_heads, n_layers = fields.count("dim"), fields.count("n_heads"), fields.count("n_layers")
    n_kv_heads = fields.either(n_heads, "n_kv_heads", "n_local_heads")
    if n_kv_heads == -1:  # torchchat's "not given"
        n_kv_heads = n_heads
    scaling = _rope_scaling(fields, dim)
    theta = fields.either(10000.0, "rope_theta", "rope_base")
    return ModelConfig(
        architecture="llama",
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=fields.either(dim // n_heads, "head_dim"),
        hidden_dim=_hidden_dim(fields, dim),
        vocab_size=_vocab_size(fields, shapes),
        context_length=_context_length(fields, theta, scaling),
        norm_eps=fields.either(1e-5, "norm_eps"),
        rope_theta=theta,
        rope_layout="interleaved",
        rope_scaling=scaling,
        tied="output.weight" not in shapes or fields.either(False, "tie_word_embeddings"),
        qkv_bias="layers.0.attention.wq.bias" in shapes or "layers.0.attention.wqkv.bias" in shapes,
        output_bias="layers.0.attention.wo.bias" in shapes,
        ffn_bias="layers.0.feed_forward.w1.bias" in shapes,
        embedding_multiplier=fields.either(1.0, "embedding_multiplier"),
        attention_multiplier=fields.get(float, "attention_multiplier"),
        residual_multiplier=fields.either(1.0, "residual_multiplier"),
        logits_scaling=fields.either(1.0, "logits_scaling"),
    )


def _hidden_dim(fields: Fields, dim: int) -> int:
    """Given, or Meta's rule: two thirds of 4 dim, times ffn_dim_multiplier, up to a multiple of multiple_of."""
    given = fields.get(int, "hidden_dim")
    if given is not None:
        return given
    hidden = int(2 * (4 * dim) / 3)
    multiplier = fields.get(float, "ffn_dim_multiplier")
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    multiple_of = fields.either(256, "multiple_of")
    return (hidden + multiple_of - 1) // multiple_of * multiple_of


def _vocab_size(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> int:
    given = fields.get(int, "vocab_size")
    if given is not None and given > 0:
        return given
    embeddings = shapes.get("tok_embeddings.weight")
    if embeddings is None:
        raise CheckpointError(
            fields.path, "vocab_size is missing, and the weights have no tok_embeddings.weight to tell"
        )
    return embeddings[0]


def _context_length(fields: Fields, theta: float, scaling: RopeScaling | None) -> int:
    """Meta's params.json doesn't say; what the models were published with follows from their RoPE."""
    given = fields.get(int, "max_seq_len", "max_seq_length", "block_size")
    if given is not None:
        return given
    if scaling is not None:
        length = 131072  # Llama 3.1, 3.2
    elif theta == 500000.0:
        length = 8192  # Llama 3
    else:
        length = 4096  # Llama 2
    logger.info("%s gives no context length; assuming %d", fields.path, length)
    return length


def _rope_scaling(fields: Fields, dim: int) -> RopeScaling | None:
    given = fields.values.get("rope_scaling")
    if isinstance(given, Mapping):  # torchchat's
        scaling = Fields(fields.path, given)
        return RopeScaling(
            kind="llama3",
            factor=scaling.need(float, "factor"),
            low_freq_factor=scaling.either(1.0, "low_freq_factor"),
            high_freq_factor=scaling.either(4.0, "high_freq_factor"),
            original_context_length=scaling.either(8192, "original_max_position_embeddings"),
        )
    if not fields.either(False, "use_scaled_rope"):
        return None
    # params.json has no factor: 8 for Llama 3.1, and 32 for the small 3.2 models, as published in their config.json
    return RopeScaling(kind="llama3", factor=fields.either(32.0 if dim < 4096 else 8.0, "rope_scaling_factor"))
