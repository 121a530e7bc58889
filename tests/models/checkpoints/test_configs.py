"""Settings as others write them, compared with what transformers makes of the same files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from models.checkpoints import generation_defaults, open_checkpoint, stop_ids_from_config
from models.config import RopeScaling
from tests import tiny

LLAMA3 = RopeScaling(kind="llama3", factor=8.0)
FAMILIES = {
    "llama": {"tied": True, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama biased": {"architecture": "llama", "qkv_bias": True, "output_bias": True, "ffn_bias": True},
    "mistral": {"architecture": "mistral", "head_dim": 32},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True},
    "granite": {
        "architecture": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
        "logits_scaling": 8.0,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_values_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """transformers loads our directory, and we load the one it saves: every number is the same, every tensor, too."""
    from transformers import AutoModelForCausalLM

    config = tiny.tiny_config(**FAMILIES[family])
    tiny.write_hf(tmp_path / "ours", config, tiny.random_tensors(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    theirs = model.config
    for folder in ("ours", "theirs"):
        checkpoint = open_checkpoint(tmp_path / folder)
        ours = checkpoint.config
        assert ours.dim == theirs.hidden_size
        assert ours.n_layers == theirs.num_hidden_layers
        assert (ours.n_heads, ours.n_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
        assert ours.head_dim == model.model.layers[0].self_attn.head_dim
        assert ours.hidden_dim == theirs.intermediate_size
        assert ours.vocab_size == theirs.vocab_size
        assert ours.context_length == theirs.max_position_embeddings
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert (ours.rope_scaling is not None) == (theirs.rope_parameters["rope_type"] == "llama3")
        assert ours.rope_scaling == config.rope_scaling
        assert ours.tied == theirs.tie_word_embeddings
        assert ours.attention_scale == pytest.approx(model.model.layers[0].self_attn.scaling)
        assert ours.logits_scaling == getattr(theirs, "logits_scaling", 1.0)
        assert ours.embedding_multiplier == getattr(theirs, "embedding_multiplier", 1.0)
        assert ours.residual_multiplier == getattr(theirs, "residual_multiplier", 1.0)
        assert ours.qkv_bias == (model.model.layers[0].self_attn.q_proj.bias is not None)
        assert ours.output_bias == (model.model.layers[0].self_attn.o_proj.bias is not None)
        assert ours.ffn_bias == (getattr(model.model.layers[0].mlp.up_proj, "bias", None) is not None)
        weight = checkpoint.tensors["layers.1.attention.wk.weight"].read()
        assert torch.equal(weight, model.model.layers[1].self_attn.k_proj.weight)


def with_config(folder: Path, **change: Any) -> Path:
    config = tiny.tiny_config(architecture=change.pop("architecture", "llama"))
    tiny.write_hf(folder, config, tiny.random_tensors(config))
    (folder / "config.json").write_text(json.dumps(tiny.hf_config(config) | change))
    return folder


def test_transformers_4_spelling(tmp_path: Path) -> None:
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    folder = with_config(tmp_path, rope_parameters=None, rope_theta=500000, rope_scaling=scaling, head_dim=None)
    found = open_checkpoint(folder).config
    assert found.rope_theta == 500000.0
    assert found.rope_scaling == RopeScaling(kind="llama3", factor=32.0)
    assert found.head_dim == 16


def test_oldest_spelling_of_linear_scaling(tmp_path: Path) -> None:
    folder = with_config(tmp_path, rope_parameters=None, rope_scaling={"type": "linear", "factor": 2})
    assert open_checkpoint(folder).config.rope_scaling == RopeScaling(kind="linear", factor=2.0)


@pytest.mark.parametrize(("window", "context"), [(None, 128), (128, 128), (4096, 128), (32, 32)])
def test_mistrals_window_limits_the_context(
    window: int | None, context: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_config(tmp_path, architecture="mistral", sliding_window=window)
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(folder).config.context_length == context
    assert ("context limited to the window, 32" in caplog.text) == (context == 32)


def test_qwen2_uses_its_window_only_when_told(tmp_path: Path) -> None:
    config = tiny.tiny_config(architecture="qwen2", qkv_bias=True)
    tiny.write_hf(tmp_path, config, tiny.random_tensors(config))
    for use, context in ((False, 128), (True, 32)):
        values = tiny.hf_config(config) | {"sliding_window": 32, "use_sliding_window": use}
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert open_checkpoint(tmp_path).config.context_length == context


def test_model_type_alone_names_the_architecture(tmp_path: Path) -> None:
    assert open_checkpoint(with_config(tmp_path, architectures=None)).config.architecture == "llama"


def write_generation_config(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def test_generation_defaults(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(with_config(tmp_path))
    assert generation_defaults(checkpoint) == {}
    write_generation_config(
        tmp_path, temperature=0.7, top_k=20, top_p=1, min_p=None, repetition_penalty=1.05, do_sample=True, cache=True
    )
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 1.0, "repetition_penalty": 1.05}
    assert generation_defaults(checkpoint) == expected
    write_generation_config(tmp_path, temperature=0.7, do_sample=False)
    assert generation_defaults(checkpoint) == {"temperature": 0.0}


def test_wrong_generation_config(tmp_path: Path) -> None:
    from errors import CheckpointError

    checkpoint = open_checkpoint(with_config(tmp_path))
    write_generation_config(tmp_path, temperature="hot")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature must be float, got 'hot'"):
        generation_defaults(checkpoint)
    write_generation_config(tmp_path, eos_token_id="</s>")
    with pytest.raises(CheckpointError, match=r"eos_token_id must be an id or a list of ids"):
        stop_ids_from_config(checkpoint)


def test_stop_ids_are_the_union(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(with_config(tmp_path, eos_token_id=2))
    assert stop_ids_from_config(checkpoint) == {2}
    write_generation_config(tmp_path, eos_token_id=[7, 2, 0])
    assert stop_ids_from_config(checkpoint) == {0, 2, 7}


def test_stop_ids_of_a_gguf(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    said = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 6}
    path = tiny.write_gguf(tmp_path / "m.gguf", config, tiny.random_tensors(config), metadata=said)
    assert stop_ids_from_config(open_checkpoint(path)) == {5, 6}
