"""Our logits are transformers', whatever the format, the family's extras, and the pieces a sequence comes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.runner import Runner
from models.build import build_model
from models.cache import KVCache, Segment
from models.checkpoints import open_checkpoint
from models.config import ModelConfig, RopeScaling
from models.transformer import Transformer, rope_angles, rotate
from tests import tiny
from tests.peer import peer_logits, peer_model

TOLERANCE = 1e-4  # float32 rounding of logits of size 1..10; measured: below 1e-5
LENGTH = 100
LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=32)
# With heads this wide there are frequencies on both sides of Llama 3's ramp, and inside it
WIDE = {"dim": 64, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied": True},
    "half": {"rope_layout": "half"},
    "one kv head": {"n_kv_heads": 1},
    "no grouping": {"n_kv_heads": 4},
    "wide heads": {"head_dim": 48},
    "narrow heads": {"head_dim": 8, "rope_layout": "half"},
    "theta": {"rope_theta": 500000.0, "norm_eps": 1e-3},
    "llama3": {"rope_scaling": LLAMA3, **WIDE},
    "llama3, half": {"rope_scaling": LLAMA3, "rope_layout": "half", "rope_theta": 500000.0, **WIDE},
    "linear": {"rope_scaling": RopeScaling("linear", factor=4.0)},
    # in a GGUF, factors that don't follow the usual rule
    "factors": {"rope_scaling": replace(LLAMA3, low_freq_factor=2.0, high_freq_factor=3.0), **WIDE},
    "all biases": {"qkv_bias": True, "output_bias": True, "ffn_bias": True},
    "mistral": {"architecture": "mistral", "rope_layout": "half"},
    "qwen2": {"architecture": "qwen2", "rope_layout": "half", "qkv_bias": True},
    "qwen2, tied": {"architecture": "qwen2", "rope_layout": "half", "qkv_bias": True, "tied": True, "head_dim": 32},
    "granite": {
        "architecture": "granite",
        "tied": True,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0625 / 2,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
}
Writer = Callable[[Path, ModelConfig, tiny.Tensors], Path]
WRITERS: dict[str, Writer] = {
    "llama2c v0": lambda folder, c, t: tiny.write_llama2c(folder / "m", c, t, version=0),
    "llama2c v1": lambda folder, c, t: tiny.write_llama2c(folder / "m", c, t, version=1),
    "pt": lambda folder, c, t: tiny.write_pt(folder / "m", c, t),
    "torchchat": lambda folder, c, t: tiny.write_torchchat(folder, c, t, fused=True),
    "torchchat, separate": lambda folder, c, t: tiny.write_torchchat(folder, c, t, fused=False, wrapped=True),
    "meta": lambda folder, c, t: tiny.write_meta(folder, c, t),
    "meta, 2 shards": lambda folder, c, t: tiny.write_meta(folder, c, t, shards=2),
    "safetensors": lambda folder, c, t: tiny.write_hf(folder, c, t),
    "safetensors, 3 shards": lambda folder, c, t: tiny.write_hf(folder, c, t, shards=3),
    "gguf": lambda folder, c, t: tiny.write_gguf(folder / "m.gguf", c, t),
}


def a_sequence(config: ModelConfig, length: int = LENGTH, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (length,), generator=generator).tolist()


def load(path: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    return build_model(open_checkpoint(path), dtype=dtype)


def run(model: Transformer, tokens: Sequence[int], pieces: Sequence[int], row_multiple: int = 1) -> Tensor:
    """Logits (N, V) of one sequence computed in `pieces`."""
    cache = KVCache(model.config, 1, len(tokens), dtype=model.norm.weight.dtype)
    runner = Runner(model, cache, row_multiple=row_multiple)
    logits, start = [], 0
    for count in pieces:
        piece = list(tokens[start : start + count])
        logits.append(runner.forward([Segment(0, start, count)], piece, list(range(count))))
        start += count
    assert start == len(tokens)
    return torch.cat(logits)


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("writer", ["safetensors", "gguf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers(family: str, writer: str, tmp_path: Path) -> None:
    """Through a file, the cache and the runner: whole, token by token and in uneven chunks."""
    config = tiny.tiny_config(**FAMILIES[family])
    tensors = tiny.random_tensors(config)
    tokens = a_sequence(config)
    theirs = peer_logits(peer_model(config, tensors), tokens)
    assert theirs.std() > 0.1  # logits that say something
    model = load(WRITERS[writer](tmp_path, config, tensors))
    worst = max(error(run(model, tokens, p), theirs) for p in ([LENGTH], [1] * LENGTH, [3, 1, 1, 60, 2, 33]))
    print(f"{family}, {writer}: max error {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("tied", [False, True], ids=["separate", "tied"])
@pytest.mark.parametrize("writer", WRITERS)
def test_every_format_gives_transformers_logits(writer: str, tied: bool, tmp_path: Path) -> None:
    config = tiny.tiny_config(tied=tied)
    tensors = tiny.random_tensors(config, seed=2)
    tokens = a_sequence(config)
    theirs = peer_logits(peer_model(config, tensors), tokens)
    assert error(run(load(WRITERS[writer](tmp_path, config, tensors)), tokens, [40, 60]), theirs) < TOLERANCE


def test_llama2c_int8(tmp_path: Path) -> None:
    """Version 2: transformers on the weights rounded as its groups round them."""
    config = tiny.tiny_config()
    tensors = tiny.random_tensors(config)
    tokens = a_sequence(config)

    def rounded(tensor: Tensor) -> Tensor:
        groups = tensor.view(-1, 32)
        scale = groups.abs().amax(1, keepdim=True) / 127
        return ((groups / scale).round() * scale).view_as(tensor)

    theirs = peer_logits(peer_model(config, {n: rounded(t) if t.ndim == 2 else t for n, t in tensors.items()}), tokens)
    ours = run(load(tiny.write_llama2c(tmp_path / "m", config, tensors, version=2)), tokens, [LENGTH])
    assert error(ours, theirs) < TOLERANCE
    assert error(ours, peer_logits(peer_model(config, tensors), tokens)) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen2", "granite", "mistral"])
def test_what_transformers_saves(family: str, tmp_path: Path) -> None:
    """Files that none of our writers had a hand in."""
    config = tiny.tiny_config(**FAMILIES[family])
    peer = peer_model(config, tiny.random_tensors(config))
    peer.save_pretrained(tmp_path)
    tokens = a_sequence(config)
    assert error(run(load(tmp_path), tokens, [LENGTH]), peer_logits(peer, tokens)) < TOLERANCE


def test_rows_in_one_step(tmp_path: Path) -> None:
    """Prefill of one row beside decoding of others, padded tokens besides: every row gets its own logits."""
    config = tiny.tiny_config(tied=True)
    tensors = tiny.random_tensors(config)
    peer = peer_model(config, tensors)
    a, b, c = (a_sequence(config, 30, seed) for seed in (1, 2, 3))
    theirs = [peer_logits(peer, tokens) for tokens in (a, b, c)]
    model = load(WRITERS["gguf"](tmp_path, config, tensors))
    runner = Runner(model, KVCache(config, 3, 128, dtype=torch.float32), row_multiple=8)
    runner.forward([Segment(2, 0, 29), Segment(0, 0, 10)], [*c[:29], *a[:10]], [])
    logits = runner.forward(
        [Segment(0, 10, 1), Segment(1, 0, 30), Segment(2, 29, 1)], [a[10], *b, c[29]], [31, 0, 30, 15]
    )
    expected = torch.stack((theirs[2][29], theirs[0][10], theirs[1][29], theirs[1][14]))
    assert error(logits, expected) < TOLERANCE


def test_rotation_keeps_distances() -> None:
    """q at m times k at n depends on m - n only, and position 0 is not turned."""
    config = tiny.tiny_config()
    cos, sin = (t.unsqueeze(1) for t in rope_angles(config, 64))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 16, generator=generator).expand(64, 1, 16) for _ in range(2))
    q, k = (rotate(x, cos, sin)[:, 0] for x in (q, k))
    scores = q @ k.T
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)
    assert (scores.diagonal(1)[0] - scores[0, 0]).abs() > 1e-2


STORIES15M = ModelConfig(
    architecture="llama",
    dim=288,
    n_layers=6,
    n_heads=6,
    n_kv_heads=6,
    head_dim=48,
    hidden_dim=768,
    vocab_size=32000,
    context_length=256,
    tied=True,
)


@pytest.mark.slow
def test_stories15m_in_every_format(tmp_path: Path) -> None:
    """Bitwise the same from every file: they hold the same floats, whatever order or names they come in."""
    tensors = tiny.random_tensors(STORIES15M)
    tokens = a_sequence(STORIES15M, 200)
    theirs = peer_logits(peer_model(STORIES15M, tensors), tokens)
    interleaved = None
    for number, (name, write) in enumerate(WRITERS.items()):
        folder = tmp_path / str(number)
        if name.startswith("meta") or name == "torchchat, separate":
            continue
        folder.mkdir()
        logits = run(load(write(folder, STORIES15M, tensors)), tokens, [200])
        worst = error(logits, theirs)
        print(f"stories15M, {name}: max error {worst:.1e}")
        assert worst < TOLERANCE
        if "safetensors" not in name:  # its rows lie in another order, so sums do, too
            interleaved = logits if interleaved is None else interleaved
            assert torch.equal(logits, interleaved), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["tied", "all biases", "granite", "qwen2"])
def test_half_precision_stays_near(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = tiny.tiny_config(**FAMILIES[family])
    tensors = tiny.random_tensors(config)
    tokens = a_sequence(config)
    theirs = peer_logits(peer_model(config, tensors), tokens)
    model = load(WRITERS["safetensors"](tmp_path, config, tensors), dtype)
    for pieces in ([LENGTH], [50] + [1] * 50):
        ours = run(model, tokens, pieces)
        relative = (ours - theirs).norm() / theirs.norm()
        print(f"{family}, {dtype}: relative error {relative:.1e}")
        assert relative < (0.03 if dtype == torch.bfloat16 else 0.004)  # a few steps of 2^-8 and 2^-11
