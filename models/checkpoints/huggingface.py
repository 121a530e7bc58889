"""ModelConfig from a Hugging Face config.json (transformers 4's and 5's spelling)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from errors import CheckpointError
from models.checkpoints.params import Fields
from models.config import ModelConfig, RopeScaling

logger = logging.getLogger(__name__)

# class name in "architectures" -> (our name, what the class assumes when config.json leaves it out)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM": ("qwen2", {"num_key_value_heads": 32}),
    "GraniteForCausalLM": ("granite", {"attention_multiplier": 1.0}),
}


def config_from_huggingface(path: Path, values: Mapping[str, Any]) -> ModelConfig:
    """`values` is the content of config.json at `path`. Weights in HF's own order: rope_layout "half"."""
    architecture, defaults = _architecture(path, values)
    fields = Fields(path, {**defaults, **values})
    _refuse_unknown(fields)
    dim, n_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    theta, scaling = _rope(fields)
    bias = fields.either(False, "attention_bias")
    return ModelConfig(
        architecture=architecture,
        dim=dim,
        n_layers=fields.count("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=fields.either(n_heads, "num_key_value_heads"),
        head_dim=fields.either(dim // n_heads, "head_dim"),
        hidden_dim=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        context_length=_context_length(fields, architecture),
        norm_eps=fields.either(1e-6, "rms_norm_eps"),
        rope_theta=theta,
        rope_layout="half",
        rope_scaling=scaling,
        tied=fields.either(False, "tie_word_embeddings"),
        qkv_bias=bias or architecture == "qwen2",
        output_bias=bias and architecture != "qwen2",
        ffn_bias=fields.either(False, "mlp_bias"),
        embedding_multiplier=fields.either(1.0, "embedding_multiplier"),
        attention_multiplier=fields.get(float, "attention_multiplier"),
        residual_multiplier=fields.either(1.0, "residual_multiplier"),
        logits_scaling=fields.either(1.0, "logits_scaling"),
    )


def _architecture(path: Path, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    given = values.get("architectures")
    model_type = values.get("model_type")
    if isinstance(given, list) and given:
        name = given[0]
    else:  # older or hand-written files have only model_type
        name = next((cls for cls, (ours, _) in ARCHITECTURES.items() if ours == model_type), model_type)
    if name not in ARCHITECTURES:
        raise CheckpointError(path, f"architecture {name} is not supported; these are: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _refuse_unknown(fields: Fields) -> None:
    """Settings that would change the output and that we don't compute."""
    activation = fields.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(fields.path, f"hidden_act {activation} is not supported, only silu")
    if fields.values.get("quantization_config") is not None:
        method = fields.values["quantization_config"]
        method = method.get("quant_method") if isinstance(method, Mapping) else method
        raise CheckpointError(
            fields.path, f"weights quantized with {method} are not supported; take the original weights and --quantize"
        )
    if fields.either(1.0, "partial_rotary_factor") != 1.0:
        raise CheckpointError(fields.path, "partial_rotary_factor other than 1 is not supported")


def _context_length(fields: Fields, architecture: str) -> int:
    """max_position_embeddings, or the sliding window if that is smaller: within it, full attention is the same."""
    length = fields.count("max_position_embeddings")
    window = fields.get(int, "sliding_window")
    used = architecture == "mistral" or fields.either(False, "use_sliding_window")
    if window is None or not used or window >= length:
        return length
    logger.warning(
        "%s: sliding-window attention is not supported; context limited to the window, %d", fields.path, window
    )
    return window


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """theta and scaling from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`."""
    given = fields.values.get("rope_parameters")
    if given is None:
        given = fields.values.get("rope_scaling")
    if given is None:
        given = {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise CheckpointError(fields.path, "RoPE parameters per layer type are not supported")
    rope = Fields(fields.path, given)
    theta = rope.either(fields.either(10000.0, "rope_theta"), "rope_theta")
    if rope.either(1.0, "partial_rotary_factor") != 1.0:
        raise CheckpointError(fields.path, "partial_rotary_factor other than 1 is not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in ("default", None):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.need(float, "factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=rope.need(float, "factor"),
            low_freq_factor=rope.need(float, "low_freq_factor"),
            high_freq_factor=rope.need(float, "high_freq_factor"),
            original_context_length=rope.need(int, "original_max_position_embeddings"),
        )
    raise CheckpointError(fields.path, f"RoPE scaling {kind} is not supported; default, linear and llama3 are")
