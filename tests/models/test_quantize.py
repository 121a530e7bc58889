"""What --quantize may say, and layers that stay close to the float ones in less memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import generate
from engine.runner import Runner
from engine.types import LoadOptions
from errors import SetupError
from models.build import build_model
from models.cache import KVCache, Segment
from models.checkpoints import Checkpoint, open_checkpoint
from models.quantize import (
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    PackedLinear,
    Quantization,
    parse_quantization,
    quantized_linear,
)
from models.transformer import Transformer
from tests import tiny

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

MEANINGS: dict[str | None, Quantization] = {
    None: Quantization(),
    "int8": Quantization(linear="int8"),
    "int4": Quantization(linear="int4", group=32),
    "{}": Quantization(),
    '{"linear:int8": {}}': Quantization(linear="int8"),
    '{"linear:int8": {"groupsize": 0}}': Quantization(linear="int8"),
    '{"linear:int8": {"bitwidth": 8, "groupsize": null}}': Quantization(linear="int8"),
    '{"linear:int4": {}}': Quantization(linear="int4", group=32),
    '{"linear:int4": {"groupsize": 256}}': Quantization(linear="int4", group=256),
    ' {"embedding": {"bitwidth": 8, "groupsize": 64}}': Quantization(embedding=True, embedding_group=64),
    '{"embedding": {"groupsize": null}}': Quantization(embedding=True),
    '{"executor": {"accelerator": "cuda"}, "precision": {"dtype": "bf16"}, "linear:int4": {"groupsize": 128}}': (
        Quantization(linear="int4", group=128, dtype="bf16", device="cuda")
    ),
}
MISTAKES = {
    "int3": "'int3' is neither int8, int4, JSON nor a file",
    "": "'' is neither",
    "x" * 5000: "is neither|can't be read",
    "{'linear:int8': {}}": "not valid JSON: Expecting property name",
    '{"linear:int8"': "not valid JSON",
    '{"linear:int8": 0}': "expected an object of objects",
    '{"linear:a8w4dq": {}}': "unknown scheme 'linear:a8w4dq'; known are linear:int8, linear:int4, embedding",
    '{"linear:int4": {"group_size": 32}}': "linear:int4 takes bitwidth, groupsize, not 'group_size'",
    '{"linear:int4": {"groupsize": 0}}': "linear:int4 groupsize must be 32 or 64 or 128 or 256, got 0",
    '{"linear:int4": {"groupsize": "32"}}': 'linear:int4 groupsize must be 32 or 64 or 128 or 256, got "32"',
    '{"linear:int4": {"groupsize": 32.0}}': "linear:int4 groupsize must be .* got 32.0",
    '{"linear:int4": {"groupsize": [32]}}': "linear:int4 groupsize must be",
    '{"linear:int8": {"groupsize": 32}}': "linear:int8 groupsize must be 0 or null, got 32",
    '{"linear:int8": {"groupsize": false}}': "linear:int8 groupsize must be 0 or null, got false",
    '{"embedding": {"bitwidth": 4}}': "embedding bitwidth must be 8, got 4",
    '{"precision": {"dtype": "fp8"}}': 'precision dtype must be "fp32" or .* got "fp8"',
    '{"executor": {"accelerator": "tpu"}}': 'executor accelerator must be "cpu" or "cuda" or "mps", got "tpu"',
    '{"linear:int8": {}, "linear:int4": {}}': "linear:int4 and linear:int8 were given",
}


@pytest.mark.parametrize("text", MEANINGS)
def test_meanings(text: str | None) -> None:
    assert parse_quantization(text) == MEANINGS[text]


def test_a_file_of_json(tmp_path: Path) -> None:
    path = tmp_path / "quantize.json"
    path.write_text('\n{"linear:int4": {"groupsize": 64}}')
    assert parse_quantization(str(path)) == Quantization(linear="int4", group=64)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SetupError, match=r"^--quantize: '.*quantize\.json' can't be read"):
        parse_quantization(str(path))


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_name_the_key(text: str) -> None:
    with pytest.raises(SetupError, match=MISTAKES[text]) as caught:
        parse_quantization(text)
    assert caught.value.param == "quantize" and "\n" not in caught.value.message


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("quantization", "allowed"),
    [
        # Gaussian rows: int8's step is about 3.3 sigma / 127, its uniform error step / sqrt(12): 0.8 %
        (Quantization(linear="int8"), 0.012),
        # 16 levels over a group's range of 4 to 5.5 sigma: 8, 9 and 10 %
        (Quantization(linear="int4", group=32), 0.09),
        (Quantization(linear="int4", group=64), 0.10),
        (Quantization(linear="int4", group=128), 0.11),
    ],
    ids=["int8", "int4, 32", "int4, 64", "int4, 128"],
)
def test_linears_stay_close(quantization: Quantization, allowed: float, dtype: torch.dtype) -> None:
    weight, bias, x = noise(96, 256) * 0.05, noise(96, seed=1), noise(7, 256, seed=2)
    exact = x @ weight.T + bias
    layer = quantized_linear(weight.to(dtype), bias.to(dtype), quantization)
    found = layer(x.to(dtype))
    assert found.dtype == dtype
    error = (found.float() - exact).norm() / (exact - bias).norm()
    assert error < allowed + 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layers_of_any_float(quantization: str | None, dtype: torch.dtype) -> None:
    """With and without bias; large activations stay finite, and zero weights zero."""
    weight = noise(64, 128)
    weight[3] = 0
    for bias in (None, noise(64, seed=1)):
        layer = quantized_linear(
            weight.to(dtype), None if bias is None else bias.to(dtype), parse_quantization(quantization)
        )
        large = torch.full((2, 128), 300.0).to(dtype)
        found = layer(large)
        assert found.dtype == dtype and found.isfinite().all()
        assert torch.equal(found[:, 3], torch.zeros_like(found[:, 3]) if bias is None else bias[3].to(dtype).expand(2))


def test_int8_in_float16_does_not_overflow() -> None:
    """One large activation: its products with 127 would pass float16's largest number."""
    weight = torch.full((4, 64), 0.5, dtype=torch.float16)
    found = Int8Linear(weight, None)(torch.full((1, 64), 100.0, dtype=torch.float16))
    torch.testing.assert_close(found, torch.full((1, 4), 3200.0, dtype=torch.float16), rtol=2e-3, atol=0)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_int4_of_small_and_large_weights(scale: float) -> None:
    weight = noise(8, 64) * scale
    found = Int4Linear(weight, None, 32).dequantize()
    assert (found - weight).norm() / weight.norm() < (0.12 if scale < 1e-3 else 0.09)
    assert (found.sign() * weight.sign() >= 0).float().mean() > 0.93  # asymmetric, yet zero stays about zero


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_beats_a_scale_alone(group: int) -> None:
    """Why there is an offset: -8..7 times a scale, as in GGUF's Q4_0, is the simpler alternative."""
    weight = noise(256, 256)
    ours = (Int4Linear(weight, None, group).dequantize() - weight).norm()
    groups = weight.unflatten(1, (-1, group))
    scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    symmetric = (((groups / scale).round().clamp(-8, 7) * scale).flatten(1) - weight).norm()
    assert ours < 0.97 * symmetric


def test_q4_1_blocks_survive_int4_exactly(tmp_path: Path) -> None:
    """A GGUF in Q4_1 with int4 at its own group size is the same model, to float32 rounding."""
    config = tiny.tiny_config()
    path = tiny.write_gguf(tmp_path / "m.gguf", config, tiny.random_tensors(config), quant="Q4_1")
    stored = open_checkpoint(path).tensors["layers.0.feed_forward.w2.weight"].read()
    found = Int4Linear(stored, None, 32).dequantize()
    assert (found - stored).abs().max() < 1e-3 * stored.abs().max()


@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_embedding_tables_stay_close(group: int) -> None:
    table = noise(50, 128)
    tokens = torch.tensor([0, 49, 7, 7])
    for dtype in FLOATS:
        found = Int8Embedding(table.to(dtype), group)(tokens)
        assert found.dtype == dtype and found.shape == (4, 128)
        assert (found.float() - table[tokens]).norm() / table[tokens].norm() < 0.012 + torch.finfo(dtype).eps


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Tied, with widths that 32, 64 and 128 divide."""
    config = tiny.tiny_config(dim=128, head_dim=32, hidden_dim=256, n_layers=4, vocab_size=512, tied=True)
    return open_checkpoint(tiny.write_hf(tmp_path_factory.mktemp("hf"), config, tiny.random_tensors(config)))


def logits(checkpoint: Checkpoint, quantize: str | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """(20, V) of one sequence, half of it token by token."""
    config = checkpoint.config
    model = build_model(checkpoint, dtype=dtype, quantization=parse_quantization(quantize), context_length=20)
    runner = Runner(model, KVCache(config, 1, 20, dtype=dtype))
    tokens = torch.randint(config.vocab_size, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    found = [runner.forward([Segment(0, 0, 10)], tokens[:10], list(range(10)))]
    found += [runner.forward([Segment(0, i, 1)], [tokens[i]], [0]) for i in range(10, 20)]
    return torch.cat(found)


@pytest.fixture(scope="module")
def exact(checkpoint: Checkpoint) -> Tensor:
    return logits(checkpoint, None)


BOTH = '{"embedding": {"groupsize": 32}, "linear:int8": {}}'


@pytest.mark.parametrize(
    ("quantize", "dtype", "cosine", "divergence"),
    [
        # 2 products in each of 4 layers add their error to the residual stream, and the output adds its own: about
        # 3 to 4 times that of one linear (test_linears_stay_close). The cosine loses half the error's square.
        ("int8", torch.float32, 0.998, 0.002),
        ("int8", torch.bfloat16, 0.998, 0.002),
        ("int8", torch.float16, 0.998, 0.002),
        ('{"embedding": {}}', torch.float32, 0.998, 0.002),
        (BOTH, torch.float32, 0.998, 0.002),
        (BOTH, torch.bfloat16, 0.998, 0.002),
        ("int4", torch.float32, 0.92, 0.12),
        ("int4", torch.bfloat16, 0.92, 0.12),
        ("int4", torch.float16, 0.92, 0.12),
        ('{"linear:int4": {"groupsize": 64}}', torch.float32, 0.91, 0.14),
        ('{"linear:int4": {"groupsize": 128}}', torch.float32, 0.89, 0.16),
    ],
)
def test_logits_stay_close(
    quantize: str, dtype: torch.dtype, cosine: float, divergence: float, checkpoint: Checkpoint, exact: Tensor
) -> None:
    found = logits(checkpoint, quantize, dtype)
    alike = torch.cosine_similarity(exact, found, dim=-1).mean()
    p, q = exact.log_softmax(-1), found.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    print(f"{quantize} {dtype}: cosine {alike:.4f}, KL {kl:.4f}")
    assert alike > cosine and kl < divergence
    assert not torch.equal(exact, found)


def nbytes(model: Transformer) -> int:
    tensors = (*model.buffers(), *model.parameters())
    return sum(t.numel() * t.element_size() for t in tensors if t is not model.cos and t is not model.sin)


def test_memory_is_saved(checkpoint: Checkpoint) -> None:
    """Bytes per weight of the linears: 4, a little over 1, and 0.5 + 4 / group for int4's scale and offset."""
    config = checkpoint.config
    table = config.vocab_size * config.dim
    weights = sum(s[0] * s[1] for n, s in config.tensor_shapes().items() if len(s) == 2) - table
    sizes = {
        text: nbytes(build_model(checkpoint, dtype=torch.float32, quantization=parse_quantization(text)))
        for text in (
            None,
            "int8",
            "int4",
            '{"linear:int4": {"groupsize": 128}}',
            '{"linear:int8": {}, "embedding": {}}',
        )
    }
    lookup, linears = 4 * table, weights + table  # the tied table is looked up in float and multiplied by
    assert sizes[None] == pytest.approx(lookup + 4 * linears, rel=0.01)
    assert sizes["int8"] == pytest.approx(lookup + linears, rel=0.04)
    assert sizes["int4"] == pytest.approx(lookup + 0.625 * linears, rel=0.04)
    assert sizes['{"linear:int4": {"groupsize": 128}}'] == pytest.approx(lookup + 0.53125 * linears, rel=0.04)
    assert sizes['{"linear:int8": {}, "embedding": {}}'] == pytest.approx(table + linears, rel=0.04)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "separate"])
def test_the_lookup_table_stays_float_unless_asked(tied: bool, tmp_path: Path) -> None:
    config = tiny.tiny_config(tied=tied)
    tensors = tiny.random_tensors(config)
    checkpoint = open_checkpoint(tiny.write_hf(tmp_path, config, tensors))

    def build(text: str) -> Transformer:
        return build_model(checkpoint, dtype=torch.float32, quantization=parse_quantization(text))

    model = build("int8")
    assert isinstance(model.tok_embeddings, nn.Embedding)
    assert torch.equal(model.tok_embeddings.weight, tensors["tok_embeddings.weight"])
    assert isinstance(model.output, Int8Linear)
    assert not any(isinstance(m, nn.Linear | PackedLinear) for m in model.modules())
    model = build('{"embedding": {"groupsize": 32}}')
    assert isinstance(model.tok_embeddings, Int8Embedding)
    assert not isinstance(model.output, Int8Linear)


class Unreadable(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"linear:int4": {"groupsize": 64}}', r"linear:int4 groupsize 64 does not divide the 96 inputs of layers"),
        ('{"linear:int4": {"groupsize": 128}}', r"; 32 does"),
        ('{"embedding": {"groupsize": 64}}', r"embedding groupsize 64 does not divide the 96 inputs of tok_embeddings"),
    ],
)
def test_groups_must_fit_before_anything_is_read(text: str, problem: str, tmp_path: Path) -> None:
    config = tiny.tiny_config(dim=96, n_heads=4, n_kv_heads=2, head_dim=24)
    checkpoint = open_checkpoint(tiny.write_hf(tmp_path, config, tiny.random_tensors(config)))
    object.__setattr__(checkpoint, "tensors", Unreadable())
    with pytest.raises(SetupError, match=problem):
        build_model(checkpoint, dtype=torch.float32, quantization=parse_quantization(text))


def test_no_group_fits(tmp_path: Path) -> None:
    config = tiny.tiny_config(dim=72, n_heads=4, n_kv_heads=2, head_dim=18)
    checkpoint = open_checkpoint(tiny.write_hf(tmp_path, config, tiny.random_tensors(config)))
    with pytest.raises(SetupError, match=r"groupsize 32 does not divide the 72 inputs .* no other size does; use int8"):
        build_model(checkpoint, dtype=torch.float32, quantization=parse_quantization("int4"))


def test_json_sets_precision_and_device() -> None:
    """Where --dtype and --device say nothing."""
    text = json.dumps({"precision": {"dtype": "bf16"}, "executor": {"accelerator": "cpu"}, "linear:int8": {}})
    placed = generate._place(LoadOptions(model="m", quantize=text))
    assert placed.dtype == torch.bfloat16 and placed.device.type == "cpu"
    placed = generate._place(LoadOptions(model="m", quantize=text, dtype="float16"))
    assert placed.dtype == torch.float16 and placed.quantization.linear == "int8"
    if not torch.cuda.is_available():
        with pytest.raises(SetupError, match="sees no cuda device"):
            generate._place(LoadOptions(model="m", quantize='{"executor": {"accelerator": "cuda"}}'))


def test_they_reach_the_running_model(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = generate._place(LoadOptions(model="m", quantize='{"precision": {"dtype": "bf16"}, "linear:int4": {}}'))
    model = generate._build(checkpoint, placed, 64)
    runner = generate._runner(model, placed, 64, LoadOptions(model="m", max_batch=2))
    assert isinstance(model.output, Int4Linear) and model.norm.weight.dtype == torch.bfloat16
    assert runner.cache.k.dtype == torch.bfloat16
    assert runner.forward([Segment(0, 0, 2)], [5, 6], [1]).isfinite().all()
