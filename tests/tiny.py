"""Tiny random models, and writers for every checkpoint format.

All writers of one (config, tensors) give files of the same model: equal logits whichever is loaded.
`config` and `tensors` are in our names; q and k rows lie as `config.rope_layout` says, and writers reorder them where
their format wants the other order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from models.checkpoints import names
from models.config import ModelConfig

Tensors = dict[str, torch.Tensor]


def tiny_config(**overrides: Any) -> ModelConfig:
    """A Llama of 2 layers and 250,000 parameters: grouped queries, separate output, interleaved RoPE."""
    config = ModelConfig(
        architecture="llama",
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        hidden_dim=192,
        vocab_size=320,
        context_length=128,
    )
    return replace(config, **overrides)


def random_tensors(config: ModelConfig, seed: int = 0) -> Tensors:
    """Every tensor of `config` in float32, scaled so that logits differ clearly between tokens."""
    generator = torch.Generator().manual_seed(seed)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * noise
        return 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5

    return {name: make(name, shape) for name, shape in config.tensor_shapes().items()}


def with_layout(config: ModelConfig, tensors: Mapping[str, torch.Tensor], layout: str) -> Tensors:
    """`tensors` with q and k rows in the order of `layout` ("interleaved" or "half")."""
    if layout == config.rope_layout:
        return dict(tensors)
    pairs = (config.head_dim // 2, 2) if layout == "half" else (2, config.head_dim // 2)

    def reorder(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if ".wq." not in name and ".wk." not in name:
            return tensor
        return tensor.view(-1, *pairs, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()

    return {name: reorder(name, tensor) for name, tensor in tensors.items()}


def write_llama2c(path: Path, config: ModelConfig, tensors: Tensors, version: int = 0, group_size: int = 32) -> Path:
    """As llama2.c's export.py. Version 2 rounds: each group of values to int8 times its own scale."""
    t = with_layout(config, tensors, "interleaved")
    matrices = [f"attention.{w}" for w in ("wq", "wk", "wv", "wo")] + [f"feed_forward.{w}" for w in ("w1", "w2", "w3")]
    sizes = [config.dim, config.hidden_dim, config.n_layers, config.n_heads, config.n_kv_heads]
    output = [] if config.tied else ["output.weight"]

    def layers(*modules: str) -> list[str]:
        return [f"layers.{i}.{module}.weight" for module in modules for i in range(config.n_layers)]

    with path.open("wb") as file:
        if version == 0:
            file.write(
                struct.pack("<7i", *sizes, config.vocab_size * (1 if config.tied else -1), config.context_length)
            )
            order = ["tok_embeddings.weight", *layers("attention_norm", *matrices[:4], "ffn_norm", *matrices[4:])]
            for name in [*order, "norm.weight"]:
                file.write(t[name].numpy().tobytes())
            file.write(np.full(config.context_length * config.head_dim, 7.0, np.float32).tobytes())
            for name in output:
                file.write(t[name].numpy().tobytes())
            return path
        header = struct.pack("<4si7iB", b"24ka", version, *sizes, config.vocab_size, config.context_length, config.tied)
        header += struct.pack("<i", group_size) if version == 2 else b""
        file.write(header.ljust(256, b"\0"))
        for name in [*layers("attention_norm", "ffn_norm"), "norm.weight"]:
            file.write(t[name].numpy().tobytes())
        for name in ["tok_embeddings.weight", *layers(*matrices), *output]:
            file.write(_int8_groups(t[name], group_size) if version == 2 else t[name].numpy().tobytes())
    return path


def _int8_groups(tensor: torch.Tensor, group_size: int) -> bytes:
    groups = tensor.reshape(-1, group_size)
    scales = groups.abs().amax(dim=1, keepdim=True) / 127
    values = torch.round(groups / scales).to(torch.int8)
    return values.numpy().tobytes() + scales.numpy().tobytes()


def write_pt(
    path: Path, config: ModelConfig, tensors: Tensors, prefix: str = "_orig_mod.", legacy: bool = False
) -> Path:
    """As TinyLlamas' train.py: `model` and `model_args`; `legacy` is torch's format from before 1.6."""
    state = {prefix + name: tensor for name, tensor in with_layout(config, tensors, "interleaved").items()}
    if config.tied:  # one storage under two names
        state[f"{prefix}output.weight"] = state[f"{prefix}tok_embeddings.weight"]
    state[f"{prefix}freqs_cos"] = torch.zeros(config.context_length, config.head_dim // 2)
    args = {
        "dim": config.dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "max_seq_len": config.context_length,
        "norm_eps": config.norm_eps,
        "dropout": 0.0,
        **_hidden_by_rule(config),
    }
    optimizer = {"state": {0: torch.zeros(8)}}
    content = {"model": state, "model_args": args, "iter_num": 298000, "optimizer": optimizer}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


def write_torchchat(
    folder: Path, config: ModelConfig, tensors: Tensors, fused: bool = True, wrapped: bool = False, prefix: str = ""
) -> Path:
    """model.pth and params.json: a bare state dict (under "model" if `wrapped`), one wqkv if `fused`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = with_layout(config, tensors, "interleaved")
    for name in [name for name in state if fused and ".wq." in name]:
        parts = [state.pop(name.replace(".wq.", f".{w}.")) for w in ("wq", "wk", "wv")]
        state[name.replace(".wq.", ".wqkv.")] = torch.cat(parts)
    state = {prefix + name: tensor for name, tensor in state.items()}
    torch.save({"model": state} if wrapped else state, folder / "model.pth")
    params: dict[str, Any] = {
        "block_size": config.context_length,
        "dim": config.dim,
        "hidden_dim": config.hidden_dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_local_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rope_base": config.rope_theta,
        "norm_eps": config.norm_eps,
        "embedding_multiplier": config.embedding_multiplier,
        "attention_multiplier": config.attention_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_scaling,
    }
    if config.rope_scaling is not None:
        params["rope_scaling"] = _scaling_dict(config)
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def write_meta(folder: Path, config: ModelConfig, tensors: Tensors, shards: int = 1) -> Path:
    """consolidated.NN.pth and params.json as Meta ships them: vocab_size -1, hidden size by rule, no context."""
    folder.mkdir(parents=True, exist_ok=True)
    state = with_layout(config, tensors, "interleaved")
    rows = ("wq", "wk", "wv", "w1", "w3", "output", "tok_embeddings")
    for shard in range(shards):
        part = {}
        for name, tensor in state.items():
            module = name.removesuffix(".weight").rpartition(".")[2]
            axis = 0 if module in rows else 1 if module in ("wo", "w2") else None
            part[name] = tensor.clone() if axis is None else tensor.chunk(shards, axis)[shard].clone()
        part["rope.freqs"] = torch.zeros(config.head_dim // 2)
        torch.save(part, folder / f"consolidated.{shard:02}.pth")
    params = {
        "dim": config.dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "vocab_size": -1,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "use_scaled_rope": config.rope_scaling is not None,
        **_hidden_by_rule(config),
    }
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def _hidden_by_rule(config: ModelConfig) -> dict[str, Any]:
    """`multiple_of` (and multiplier) from which Meta's rule gives this hidden size."""
    if config.hidden_dim >= 8 * config.dim // 3:
        return {"multiple_of": config.hidden_dim}
    return {"multiple_of": 1, "ffn_dim_multiplier": (config.hidden_dim + 0.5) / int(8 * config.dim / 3)}


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json that transformers 5 would write."""
    names_by_architecture = {
        "qwen2": "Qwen2ForCausalLM",
        "granite": "GraniteForCausalLM",
        "mistral": "MistralForCausalLM",
    }
    values: dict[str, Any] = {
        "architectures": [names_by_architecture.get(config.architecture, "LlamaForCausalLM")],
        "model_type": config.architecture,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.ffn_bias,
    }
    if config.rope_scaling is not None:
        values["rope_parameters"] |= _scaling_dict(config)
    if config.architecture == "mistral":
        values["sliding_window"] = None
    if config.architecture == "granite":
        values["embedding_multiplier"] = config.embedding_multiplier
        values["attention_multiplier"] = config.attention_scale
        values["residual_multiplier"] = config.residual_multiplier
        values["logits_scaling"] = config.logits_scaling
    return values


def _scaling_dict(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    assert scaling is not None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context_length,
    }


def write_hf(
    folder: Path, config: ModelConfig, tensors: Tensors, shards: int = 1, dtype: torch.dtype = torch.float32
) -> Path:
    """config.json and safetensors; with `shards` of 2 or more also the index."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = {ours: theirs for theirs, ours in names.HUGGINGFACE.items()}
    state = {}
    for name, tensor in with_layout(config, tensors, "half").items():
        layer, module, kind = _parts(name)
        raw = f"{layer}{modules[module]}.{kind}"
        state[raw if raw.startswith("lm_head") else f"model.{raw}"] = tensor.to(dtype).contiguous()
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(state.items())[shard::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _parts(name: str) -> tuple[str, str, str]:
    """layers.0.attention.wq.weight -> layers.0., attention.wq, weight."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return "", module, kind
    _, number, rest = module.split(".", 2)
    return f"layers.{number}.", rest, kind


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Tensors,
    quant: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    parts: int = 1,
) -> Path:
    """As llama.cpp's converter: matrices in `quant`, vectors in float32. `metadata` are further key-values (tokenizer).

    With `parts` above 1, `path` is the stem's file, and NAME-0000i-of-0000N.gguf are written; the first is returned.
    """
    architecture = "llama" if config.architecture == "mistral" else config.architecture
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=-(-len(tensors) // parts) if parts > 1 else 0)
    _add_hyperparameters(writer, config, architecture)
    for key, value in ({} if metadata is None else metadata).items():
        _add_value(writer, key, value)
    modules = {ours: theirs for theirs, ours in names.GGUF.items()}
    kind = gguf.GGMLQuantizationType[quant]
    for name, tensor in with_layout(config, tensors, "half" if architecture == "qwen2" else "interleaved").items():
        layer, module, suffix = _parts(name)
        raw = f"{layer.replace('layers', 'blk')}{modules[module]}.{suffix}"
        if tensor.ndim == 1 or quant == "F32":
            writer.add_tensor(raw, tensor.contiguous().numpy())
        else:
            writer.add_tensor(raw, gguf.quants.quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def _add_hyperparameters(writer: gguf.GGUFWriter, config: ModelConfig, architecture: str) -> None:
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.hidden_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    if architecture == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_scale)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def rope_factors(config: ModelConfig) -> np.ndarray[Any, Any]:
    """rope_freqs.weight as convert_hf_to_gguf.py computes it for Llama 3 scaling."""
    scaling = config.rope_scaling
    assert scaling is not None
    factors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * config.rope_theta ** (i / config.head_dim)
        if wavelength < scaling.original_context_length / scaling.high_freq_factor:
            factors.append(1.0)
        elif wavelength > scaling.original_context_length / scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            smooth = (scaling.original_context_length / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, dtype=np.float32)
