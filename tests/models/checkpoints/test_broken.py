"""What is wrong with a file is said in one line that names the file and the tensor or key."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import CheckpointError
from models.checkpoints import open_checkpoint
from models.config import ModelConfig
from tests import tiny

WEIGHTS: dict[str, Callable[[Path, ModelConfig, tiny.Tensors], Path]] = {
    "llama2c v0": lambda folder, c, t: tiny.write_llama2c(folder / "m.bin", c, t, version=0),
    "llama2c v1": lambda folder, c, t: tiny.write_llama2c(folder / "m.bin", c, t, version=1),
    "llama2c v2": lambda folder, c, t: tiny.write_llama2c(folder / "m.bin", c, t, version=2),
    "pt": lambda folder, c, t: tiny.write_pt(folder / "m.pt", c, t),
    "pt legacy": lambda folder, c, t: tiny.write_pt(folder / "m.pt", c, t, legacy=True),
    "meta": lambda folder, c, t: tiny.write_meta(folder, c, t) / "consolidated.00.pth",
    "hf": lambda folder, c, t: tiny.write_hf(folder, c, t) / "model.safetensors",
    "gguf": lambda folder, c, t: tiny.write_gguf(
        folder / "m.gguf", c, t, quant="Q8_0", metadata={"tokenizer.ggml.tokens": ["token"] * 200}
    ),
}


def refused(path: Path, pattern: str) -> str:
    """Open `path`, which must fail with a one-line message that matches."""
    with pytest.raises(CheckpointError, match=pattern) as caught:
        open_checkpoint(path)
    assert "\n" not in caught.value.message
    assert str(path.name) in caught.value.message or path.is_dir()
    return caught.value.message


@pytest.fixture
def config() -> ModelConfig:
    return tiny.tiny_config()


@pytest.fixture
def tensors(config: ModelConfig) -> tiny.Tensors:
    return tiny.random_tensors(config)


@pytest.fixture(scope="module", params=WEIGHTS)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.tiny_config()
    folder = tmp_path_factory.mktemp("weights")
    path = WEIGHTS[request.param](folder, config, tiny.random_tensors(config))
    open_checkpoint(path)
    return path


def test_truncated_anywhere(weights: Path) -> None:
    """A copy cut at any of these lengths is refused when opened, before a page of it is touched."""
    whole = weights.read_bytes()
    chances = random.Random(5)
    ends = {0, 1, 4, 8, 27, 28, 40, 255, 300, 4096, len(whole) // 2, len(whole) - 64, len(whole) - 1}
    ends |= {chances.randrange(len(whole)) for _ in range(12)}
    cut = weights.with_name(f"cut{weights.suffix}")
    for end in sorted(ends):
        cut.write_bytes(whole[:end])
        refused(cut, r"truncated|damaged|empty|not a weights file|bytes")
    cut.unlink()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_flipped_header_bytes_never_crash(weights: Path, data: st.DataObject) -> None:
    """Damage in the first kilobyte either goes unnoticed or is a CheckpointError, at opening or at reading."""
    damaged = bytearray(weights.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 1023))] = data.draw(st.integers(0, 255))
    path = weights.with_name("damaged.bin")
    path.write_bytes(damaged)
    try:
        for stored in open_checkpoint(path).tensors.values():
            stored.read()
    except CheckpointError as error:
        assert "\n" not in error.message
    finally:
        path.unlink()


def test_not_a_weights_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    refused(path, "no such file")
    path.touch()
    refused(path, "is empty")
    path.write_text("Once upon a time there was a dog who could not read files.\n" * 10)
    refused(path, "not a weights file")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 60816028\n")
    refused(path, "git-lfs pointer")
    assert "git-lfs pointer" in refused(tmp_path, "git-lfs")
    path.unlink()
    refused(tmp_path, "holds no weights file")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    refused(path, "can't be read")


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch exploited",)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_refused_and_not_run(legacy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    torch.save({"model": {"w": Exploit()}}, path, _use_new_zipfile_serialization=not legacy)
    refused(path, r"contains code \((posix|nt)\.system\), which is never run")
    path.write_bytes(pickle.dumps(Exploit()))
    refused(path, "contains code")
    assert not (tmp_path / "exploited").exists()


def test_whole_modules_and_other_contents(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(torch.nn.Linear(2, 2), path)
    refused(path, r"contains code \(torch\.nn\.modules\.linear\.Linear\)")
    torch.save([torch.zeros(2)], path)
    refused(path, "holds a list, expected a dict of tensors")
    torch.save({"epoch": 3, "lr": 0.1}, path)
    refused(path, "holds no tensors; its keys are epoch, lr")
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello" * 20)
    refused(path, "zip archive, but not one that torch.save wrote")


def test_no_settings_beside(config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path) -> None:
    tiny.write_torchchat(tmp_path, config, tensors)
    (tmp_path / "params.json").unlink()
    refused(tmp_path / "model.pth", r"looked for model\.json, params\.json, config\.json")


def test_settings_that_are_wrong(config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path) -> None:
    tiny.write_torchchat(tmp_path, config, tensors)
    params = json.loads((tmp_path / "params.json").read_text())

    def with_params(text: str, pattern: str) -> None:
        (tmp_path / "params.json").write_text(text)
        with pytest.raises(CheckpointError, match=pattern) as caught:
            open_checkpoint(tmp_path)
        assert str(tmp_path) in caught.value.message

    with_params("{", "can't be read as JSON")
    with_params("[1]", "must hold a JSON object, not a list")
    with_params(json.dumps({k: v for k, v in params.items() if k != "n_heads"}), "n_heads is missing")
    with_params(json.dumps(params | {"n_layers": "two"}), "n_layers must be int, got 'two'")
    with_params(json.dumps(params | {"dim": 0}), "dim must be positive")
    with_params(
        json.dumps(params | {"n_layers": 3}), r"tensor layers\.2\.attention_norm\.weight \(and 8 more\) is missing"
    )
    with_params(json.dumps(params | {"n_layers": 1}), r"layers\.1\.\S+ .* has no place in a llama model of 1 layers")
    with_params(
        json.dumps(params | {"vocab_size": 99}),
        r"tensor tok_embeddings\.weight has shape \(320, 64\), expected \(99, 64\)",
    )
    with_params(json.dumps(params | {"n_local_heads": 3}), "can't share 3 key/value heads")


@pytest.mark.parametrize("format", ["pt", "hf", "gguf"])
def test_missing_misshapen_and_extra_tensors(
    format: str, config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path
) -> None:
    def write(changed: tiny.Tensors) -> Path:
        writers = {"pt": tiny.write_pt, "hf": tiny.write_hf, "gguf": tiny.write_gguf}
        path: Path = writers[format](tmp_path / f"m.{format}", config, changed)
        return path

    name = "layers.1.feed_forward.w2.weight"
    path = write({key: tensor for key, tensor in tensors.items() if key != name})
    refused(path, rf"tensor {re.escape(name)} is missing; expected shape \(64, 192\)")
    path = write(tensors | {name: torch.zeros(64, 96)})
    refused(path, rf"tensor {re.escape(name)} has shape \(64, 96\), expected \(64, 192\)")
    path = write(tensors | {"layers.1.attention.wo.bias": torch.zeros(64)})
    refused(path, r"tensor layers\.1\.attention\.wo\.bias \(64,\) \(1 such\) has no place")


def test_tensors_that_are_no_floats(config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path) -> None:
    path = tiny.write_pt(tmp_path / "m.pt", config, tensors | {"norm.weight": torch.ones(64, dtype=torch.int8)})
    refused(path, r"tensor norm\.weight is int8; expected one of")


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; these are: LlamaForCausalLM",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "architecture gpt2 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized with gptq"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling yarn is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling dynamic"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
    ],
)
def test_hugging_face_configs_that_we_cannot_run(
    change: dict[str, Any], pattern: str, config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path
) -> None:
    tiny.write_hf(tmp_path, config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config(config) | change))
    refused(tmp_path, pattern)


def test_missing_shards(config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path) -> None:
    tiny.write_hf(tmp_path / "hf", config, tensors, shards=2)
    shard = tmp_path / "hf" / "model-00002-of-00002.safetensors"
    shard.unlink()
    refused(tmp_path / "hf", r"model-00002-of-00002\.safetensors: is missing")
    shard.write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path / "hf", r"model-00002-of-00002\.safetensors: is a git-lfs pointer")
    tiny.write_gguf(tmp_path / "m.gguf", config, tensors, parts=2)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf: is missing; the model has 2 parts"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_llama2c_that_does_not_add_up(config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path) -> None:
    path = tiny.write_llama2c(tmp_path / "m.bin", config, tensors, version=1)
    data = bytearray(path.read_bytes())
    path.write_bytes(data + b"\0" * 4)
    refused(path, rf"has {len(data) + 4} bytes, expected {len(data)}")
    struct.pack_into("<i", data, 4, 9)
    path.write_bytes(data)
    refused(path, "llama2.c version 9 is not supported")


@pytest.mark.parametrize(
    ("key", "value", "pattern"),
    [
        ("llama.expert_count", 8, "mixtures of experts"),
        ("llama.rope.scaling.type", "yarn", "RoPE scaling yarn"),
    ],
)
def test_gguf_that_we_cannot_run(
    key: str, value: Any, pattern: str, config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path
) -> None:
    more = {"llama.rope.scaling.factor": 4.0} if "scaling" in key else {}
    refused(tiny.write_gguf(tmp_path / "m.gguf", config, tensors, metadata={key: value, **more}), pattern)


def test_gguf_of_another_architecture_or_version(config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.tiny_config(architecture="gemma3"), tensors)
    refused(path, "architecture gemma3 is not supported; these are: llama, granite, qwen2")
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 4, 1)
    path.write_bytes(data)
    refused(path, "GGUF version 1 is not supported")
