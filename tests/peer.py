"""The same model in transformers: an implementation that shares no line with ours.

Names and the order of q and k rows are written down here once more, so that an error in models.checkpoints.names or
tests.tiny can't cancel itself out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from models.config import ModelConfig

_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
}
_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def peer_model(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Any:
    """transformers' float32 model with these weights (our names; q and k rows as config.rope_layout says)."""
    settings, model_class = _CLASSES[config.architecture]
    with torch.device("meta"):
        model = model_class(settings(**_settings(config)))
    model.load_state_dict(peer_tensors(config, tensors), strict=not config.tied, assign=True)
    model.tie_weights()
    rotary = type(model.model.rotary_emb)(model.config)
    if config.rope_scaling is not None and config.rope_scaling.kind == "factors":
        rotary.inv_freq /= torch.tensor(config.rope_scaling.factors)
    model.model.rotary_emb = rotary
    assert not any(p.is_meta for p in model.parameters())
    return model.eval()


def peer_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under transformers' names, q and k rows in transformers' order."""
    top = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    state = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if module in top:
            state[f"{top[module]}.{kind}"] = tensor
            continue
        _, layer, rest = module.split(".", 2)
        if rest in ("attention.wq", "attention.wk") and config.rope_layout == "interleaved":
            tensor = _pairs_to_halves(tensor, config.head_dim)
        state[f"model.layers.{layer}.{_MODULES[rest]}.{kind}"] = tensor
    return state


def _pairs_to_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows 0 2 4 ... 1 3 5 ... of every head: what convert_llama_weights_to_hf.py does to Meta's weights."""
    heads = tensor.shape[0] // head_dim
    order = [h * head_dim + i for h in range(heads) for i in (*range(0, head_dim, 2), *range(1, head_dim, 2))]
    return tensor[order]


def _settings(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None and scaling.kind == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_length,
        }
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.ffn_bias,
        "attn_implementation": "eager",
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.architecture == "mistral":
        settings["sliding_window"] = None
    if config.architecture == "granite":
        settings |= {
            "embedding_multiplier": config.embedding_multiplier,
            "attention_multiplier": config.attention_scale,
            "residual_multiplier": config.residual_multiplier,
            "logits_scaling": config.logits_scaling,
        }
    return settings


@torch.inference_mode()
def peer_logits(model: Any, tokens: list[int]) -> Tensor:
    """(N, V) of one sequence."""
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()
