"""One model written in every format opens to the same config and the same tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from errors import CheckpointError
from models.checkpoints import Checkpoint, open_checkpoint
from models.config import ModelConfig, RopeScaling
from tests import tiny

Write = Callable[[Path, ModelConfig, tiny.Tensors], Path]

WRITERS: dict[str, Write] = {
    "llama2c v0": lambda folder, c, t: tiny.write_llama2c(folder / "weights", c, t, version=0),
    "llama2c v1": lambda folder, c, t: tiny.write_llama2c(folder / "weights", c, t, version=1),
    "tinyllamas": lambda folder, c, t: tiny.write_pt(folder / "weights", c, t),
    "tinyllamas legacy": lambda folder, c, t: tiny.write_pt(folder / "weights", c, t, legacy=True),
    "tinyllamas module": lambda folder, c, t: tiny.write_pt(folder / "weights", c, t, prefix="_orig_mod.module."),
    "torchchat": lambda folder, c, t: tiny.write_torchchat(folder, c, t),
    "torchchat wrapped": lambda folder, c, t: tiny.write_torchchat(folder, c, t, fused=False, wrapped=True),
    "torchchat prefixed": lambda folder, c, t: tiny.write_torchchat(folder, c, t, prefix="module.module."),
    "meta": lambda folder, c, t: tiny.write_meta(folder, c, t),
    "meta 2 shards": lambda folder, c, t: tiny.write_meta(folder, c, t, shards=2),
    "hf": lambda folder, c, t: tiny.write_hf(folder, c, t),
    "hf 2 shards": lambda folder, c, t: tiny.write_hf(folder, c, t, shards=2),
    "gguf": lambda folder, c, t: tiny.write_gguf(folder / "weights", c, t),
    "gguf split": lambda folder, c, t: tiny.write_gguf(folder / "weights.gguf", c, t, parts=3),
}
FORMATS = {
    "llama2c": "llama2c",
    "tinyllamas": "pytorch",
    "torchchat": "pytorch",
    "meta": "pytorch",
    "hf": "safetensors",
}


def assert_same_tensors(checkpoint: Checkpoint, config: ModelConfig, tensors: tiny.Tensors, **tolerance: float) -> None:
    assert list(checkpoint.tensors) == list(config.tensor_shapes())
    expected = tiny.with_layout(config, tensors, checkpoint.config.rope_layout)
    for name, stored in checkpoint.tensors.items():
        assert stored.shape == config.tensor_shapes()[name]
        value = stored.read()
        assert value.shape == stored.shape and value.device.type == "cpu"
        torch.testing.assert_close(value, expected[name], **({"rtol": 0, "atol": 0} | tolerance), msg=name)


@pytest.mark.parametrize("tied", [False, True], ids=["separate", "tied"])
@pytest.mark.parametrize("writer", WRITERS)
def test_every_format_gives_the_same_tensors(writer: str, tied: bool, tmp_path: Path) -> None:
    config = tiny.tiny_config(tied=tied)
    tensors = tiny.random_tensors(config, seed=1)
    checkpoint = open_checkpoint(WRITERS[writer](tmp_path, config, tensors))
    assert_same_tensors(checkpoint, config, tensors)
    layout = "half" if writer.startswith("hf") else "interleaved"
    eps = pytest.approx(config.norm_eps)
    context = 4096 if writer.startswith("meta") else config.context_length  # Meta's files don't say
    assert replace(checkpoint.config, norm_eps=config.norm_eps) == replace(
        config, rope_layout=layout, context_length=context
    )
    assert checkpoint.config.norm_eps == eps
    assert checkpoint.format == FORMATS.get(writer.split()[0], "gguf")
    assert checkpoint.precision in ("float32", "F32")
    assert checkpoint.folder == tmp_path


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_with_one_model_opens_as_the_model(writer: str, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    WRITERS[writer](tmp_path, config, tensors)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>" + bytes(64))
    (tmp_path / "README.md").write_text("# A model\n" * 20)
    assert_same_tensors(open_checkpoint(tmp_path), config, tensors)


def test_llama2c_version_2_dequantises(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    checkpoint = open_checkpoint(tiny.write_llama2c(tmp_path / "m", config, tensors, version=2, group_size=16))
    assert checkpoint.precision == "int8"
    # half a step of each group's scale, whose largest value here is below 4 sigma of rows 64 wide
    assert_same_tensors(checkpoint, config, tensors, atol=4 / 127 / 2)
    name = "layers.1.feed_forward.w2.weight"
    values = tensors[name].reshape(-1, 16)
    scales = values.abs().amax(dim=1, keepdim=True) / 127
    exact = (torch.round(values / scales) * scales).view(config.dim, config.hidden_dim)
    assert torch.equal(checkpoint.tensors[name].read(), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_safetensors_keep_their_own_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    checkpoint = open_checkpoint(tiny.write_hf(tmp_path, config, tensors, dtype=dtype))
    assert checkpoint.precision == str(dtype).removeprefix("torch.")
    assert_same_tensors(checkpoint, config, {name: tensor.to(dtype) for name, tensor in tensors.items()})


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_quantizations_stay_close(quant: str, tmp_path: Path) -> None:
    config = tiny.tiny_config(architecture="qwen2", qkv_bias=True, rope_layout="half", tied=True)
    tensors = tiny.random_tensors(config)
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "m", config, tensors, quant=quant))
    assert checkpoint.precision == {"F16": "float16", "BF16": "bfloat16"}.get(quant, quant)
    for name, stored in checkpoint.tensors.items():
        error = (stored.read().float() - tensors[name]).norm() / tensors[name].norm()
        assert error < {"F16": 1e-3, "BF16": 4e-3, "Q8_0": 1e-2}.get(quant, 0.12), name


BIASED = {
    "qwen2": tiny.tiny_config(architecture="qwen2", qkv_bias=True, rope_layout="half"),
    "llama": tiny.tiny_config(qkv_bias=True, output_bias=True, ffn_bias=True),
    "granite": tiny.tiny_config(
        architecture="granite",
        embedding_multiplier=12.0,
        attention_multiplier=0.25,
        residual_multiplier=0.5,
        logits_scaling=8.0,
        tied=True,
    ),
}


@pytest.mark.parametrize("family", BIASED)
@pytest.mark.parametrize("write", [tiny.write_hf, lambda path, c, t: tiny.write_gguf(path, c, t)], ids=["hf", "gguf"])
def test_biases_and_multipliers(family: str, write: Write, tmp_path: Path) -> None:
    config = BIASED[family]
    tensors = tiny.random_tensors(config)
    checkpoint = open_checkpoint(write(tmp_path / "m", config, tensors))
    assert_same_tensors(checkpoint, config, tensors)
    assert replace(checkpoint.config, norm_eps=1e-5, rope_layout=config.rope_layout) == config


def test_fused_biases_are_split(tmp_path: Path) -> None:
    config = tiny.tiny_config(qkv_bias=True)
    tensors = tiny.random_tensors(config)
    assert_same_tensors(open_checkpoint(tiny.write_torchchat(tmp_path, config, tensors)), config, tensors)


def test_head_dim_can_differ_from_dim_over_heads(tmp_path: Path) -> None:
    config = tiny.tiny_config(head_dim=32)
    tensors = tiny.random_tensors(config)
    for folder in (
        tiny.write_hf(tmp_path / "hf", config, tensors),
        tiny.write_torchchat(tmp_path / "torchchat", config, tensors),
        tiny.write_gguf(tmp_path / "gguf", config, tensors),
    ):
        assert_same_tensors(open_checkpoint(folder), config, tensors)


@pytest.mark.parametrize("hidden_dim", [96, 256])
def test_hidden_size_follows_metas_rule(hidden_dim: int, tmp_path: Path) -> None:
    config = tiny.tiny_config(hidden_dim=hidden_dim)
    tensors = tiny.random_tensors(config)
    assert open_checkpoint(tiny.write_meta(tmp_path, config, tensors)).config.hidden_dim == hidden_dim


def test_llama_2_shards_cut_embeddings_by_width(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    tiny.write_meta(tmp_path, config, tensors, shards=2)
    for shard in range(2):
        path = tmp_path / f"consolidated.{shard:02}.pth"
        part = torch.load(path)
        part["tok_embeddings.weight"] = tensors["tok_embeddings.weight"].chunk(2, dim=1)[shard].clone()
        torch.save(part, path)
    assert_same_tensors(open_checkpoint(tmp_path), config, tensors)


def test_one_safetensors_file_uses_the_config_beside_it(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    tiny.write_hf(tmp_path / "whole", config, tensors)
    tiny.write_hf(tmp_path / "cut", config, tensors, shards=2)
    assert_same_tensors(open_checkpoint(tmp_path / "whole" / "model.safetensors"), config, tensors)
    # any shard that the index lists means the whole model
    assert_same_tensors(open_checkpoint(tmp_path / "cut" / "model-00002-of-00002.safetensors"), config, tensors)


def test_several_safetensors_without_an_index_are_one_model(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    tiny.write_hf(tmp_path, config, tensors, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_same_tensors(open_checkpoint(tmp_path), config, tensors)


def test_hugging_face_bin_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    tiny.write_hf(tmp_path, config, tensors)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "pytorch" and checkpoint.config.rope_layout == "half"
    assert_same_tensors(checkpoint, config, tensors)


def test_torchchats_weights_beside_a_hugging_face_config(tmp_path: Path) -> None:
    """torchchat converts a hub download and leaves its config.json: the names decide the order of q and k."""
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    tiny.write_torchchat(tmp_path, config, tensors)
    (tmp_path / "params.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config(config)))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.rope_layout == "interleaved"
    assert_same_tensors(checkpoint, config, tensors)


def test_settings_by_the_weights_stem(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    tiny.write_torchchat(tmp_path, config, tensors)
    (tmp_path / "params.json").rename(tmp_path / "model.json")
    assert_same_tensors(open_checkpoint(tmp_path / "model.pth"), config, tensors)


def test_names_say_nothing_about_the_format(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    tiny.write_gguf(tmp_path / "model.safetensors", config, tensors)
    tiny.write_pt(tmp_path / "stories.gguf", config, tensors)
    tiny.write_llama2c(tmp_path / "weights.pt", config, tensors)
    found = [open_checkpoint(tmp_path / name).format for name in ("model.safetensors", "stories.gguf", "weights.pt")]
    assert found == ["gguf", "pytorch", "llama2c"]


@pytest.mark.parametrize("kind", ["llama3", "linear"])
@pytest.mark.parametrize("write", [tiny.write_hf, lambda path, c, t: tiny.write_gguf(path, c, t)], ids=["hf", "gguf"])
def test_rope_scaling(kind: str, write: Write, tmp_path: Path) -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0) if kind == "llama3" else RopeScaling(kind="linear", factor=4.0)
    config = tiny.tiny_config(rope_theta=500000.0, rope_scaling=scaling)
    checkpoint = open_checkpoint(write(tmp_path / "m", config, tiny.random_tensors(config)))
    assert checkpoint.config.rope_scaling == scaling
    assert checkpoint.config.rope_theta == 500000.0


def test_rope_scaling_of_torchchat_and_meta(tmp_path: Path) -> None:
    config = tiny.tiny_config(rope_theta=500000.0, rope_scaling=RopeScaling(kind="llama3", factor=32.0))
    tensors = tiny.random_tensors(config)
    torchchat = open_checkpoint(tiny.write_torchchat(tmp_path / "a", config, tensors))
    meta = open_checkpoint(tiny.write_meta(tmp_path / "b", config, tensors))
    assert torchchat.config.rope_scaling == meta.config.rope_scaling == config.rope_scaling
    assert meta.config.context_length == 131072


def test_other_rope_factors_are_kept(tmp_path: Path) -> None:
    """A llama3 rule with other constants than the published ones can't be told from its factors: they are kept."""
    scaling = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=3.0)
    config = tiny.tiny_config(rope_theta=500000.0, rope_scaling=scaling)
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "m", config, tiny.random_tensors(config)))
    found = checkpoint.config.rope_scaling
    assert found is not None and found.kind == "factors"
    assert found.factors == pytest.approx(tiny.rope_factors(config).tolist())


def test_metadata(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    pt = open_checkpoint(tiny.write_pt(tmp_path / "pt", config, tensors))
    assert pt.metadata["iter_num"] == 298000 and "optimizer" not in pt.metadata
    said = {"tokenizer.ggml.tokens": ["a", "é", "ĠĠ", ""], "tokenizer.ggml.scores": [0.0, -1.5], "a.flag": True, "n": 7}
    gguf = open_checkpoint(tiny.write_gguf(tmp_path / "gguf", config, tensors, metadata=said))
    assert {key: gguf.metadata[key] for key in said} == said
    assert gguf.metadata["general.architecture"] == "llama"
    assert open_checkpoint(tiny.write_llama2c(tmp_path / "bin", config, tensors)).metadata == {}


def test_two_models_in_a_folder_are_a_question(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    tiny.write_gguf(tmp_path / "one.gguf", config, tensors)
    shutil.copy(tmp_path / "one.gguf", tmp_path / "two.gguf")
    with pytest.raises(CheckpointError, match=r"holds several models; name one of one\.gguf, two\.gguf"):
        open_checkpoint(tmp_path)
