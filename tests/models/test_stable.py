"""The sizes found give the same bits; what can't be made stable is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from models import stable
from models.build import build_model
from models.cache import KVCache, Plan, Segment
from models.checkpoints import open_checkpoint
from models.quantize import parse_quantization
from models.stable import ROW_MULTIPLES, stable_attention, stable_rows
from models.transformer import Transformer
from tests import tiny

FLOAT = torch.float32


class Fake(nn.Module):
    """A linear layer whose low bits depend on how many rows it gets, as `bits` says."""

    def __init__(self, in_features: int, out_features: int, bits: Callable[[int], float]) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, bits

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, self.out_features) * (1 + self.bits(len(x)) * 2**-20)


def steady(rows: int) -> float:
    return -(2**20)  # every result is zero


def model_of(**bits: Callable[[int], float]) -> Transformer:
    """A model of fakes; modules not named are steady."""
    model = Transformer(tiny.tiny_config(n_layers=1), 8)
    for path in ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2", "output"):
        name = path.rpartition(".")[2]
        parent = model if path == "output" else model.get_submodule(f"layers.0.{path.partition('.')[0]}")
        linear = getattr(parent, name)
        setattr(parent, name, Fake(linear.in_features, linear.out_features, bits.get(name, steady)))
    return model


@pytest.mark.parametrize("module", ["output", "wo"])
@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (lambda rows: 0, 1),
        (lambda rows: rows < 4, 4),  # what float32 F.linear does
        (lambda rows: rows % 8 != 0, 8),
        (lambda rows: rows % 16, 16),
        (lambda rows: rows, None),
        (lambda rows: rows > 40, None),  # many rows unlike few: no padding helps
    ],
)
def test_rows_are_found_or_refused(bits: Callable[[int], float], expected: int | None, module: str) -> None:
    assert stable_rows(model_of(**{module: bits}), FLOAT) == expected


def test_every_layer_counts() -> None:
    """The strictest decides."""
    assert stable_rows(model_of(output=lambda rows: rows < 4, wqkv=lambda rows: rows % 8 != 0), FLOAT) == 8
    assert stable_rows(model_of(output=lambda rows: rows < 4, w2=lambda rows: rows), FLOAT) is None


class Misplaced(Fake):
    """The place among the rows matters, not their number: no padding helps."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.arange(len(x))[:, None] * 2**-20)


def test_rows_must_not_depend_on_their_place() -> None:
    model = model_of()
    model.output = Misplaced(64, 320, lambda rows: 0)
    assert stable_rows(model, FLOAT) is None


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_rows_of_real_layers(quantize: str | None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is found holds for other numbers and counts than those it was found with."""
    config = tiny.tiny_config()
    path = tiny.write_hf(tmp_path_factory.mktemp("hf"), config, tiny.random_tensors(config))
    model = build_model(open_checkpoint(path), dtype=FLOAT, quantization=parse_quantization(quantize))
    with torch.inference_mode():
        multiple = stable_rows(model, FLOAT)
        assert multiple in ROW_MULTIPLES
        for layer in (model.output, model.layers[0].feed_forward.w2):
            x = torch.randn(256, int(layer.in_features), generator=torch.Generator().manual_seed(7))
            whole = layer(x)
            for count in (1, 2, 6, 9, 31, 64, 100, 200):
                padded = -(-count // multiple) * multiple
                assert torch.equal(layer(x[:padded]), whole[:padded]), (type(layer), count)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_attention_sizes_hold(group: int) -> None:
    """Token by token, in chunks and whole, behind another row's tokens: the same bits."""
    config = tiny.tiny_config(n_kv_heads=4 // group)
    rounding = stable_attention(config, FLOAT)
    assert rounding is not None and rounding.query_rows in ROW_MULTIPLES
    tokens = 300
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(tokens, h, 16, generator=generator) for h in (4, 4 // group, 4 // group))

    def attended(*counts: int) -> Tensor:
        cache, start, pieces = KVCache(config, 2, tokens, dtype=FLOAT, rounding=rounding), 0, []
        for count in counts:
            piece = slice(start, start + count)
            company = [Segment(0, 0, 3), Segment(1, start, count)]
            inputs = (torch.cat((t[:3], t[piece])) for t in (q, k, v))
            pieces.append(cache.attend(cache.plan(company), 0, *inputs)[3:])
            start += count
        assert start == tokens
        return torch.cat(pieces)

    whole = attended(tokens)
    assert torch.equal(attended(*[1] * tokens), whole)
    assert torch.equal(attended(7, 1, 64, 1, 1, 100, 2, 124), whole)


def test_unstable_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that adds up differently when there are many queries."""
    real = KVCache.attend

    def attend(self: KVCache, plan: Plan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return real(self, plan, layer, q, k, v) * (1 + (len(q) > 100) * 2**-20)

    monkeypatch.setattr(KVCache, "attend", attend)
    assert stable_attention(tiny.tiny_config(), FLOAT) is None


def test_lengths_that_add_up_differently_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 128 keys gives other bits here: they are read as the next allowed length."""
    config = tiny.tiny_config()
    usual = stable_attention(config, FLOAT)
    real = KVCache._seen

    def seen(self: KVCache, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return real(self, q, k, v, mask) * (1 + (k.shape[1] == 128) * 2**-20)

    monkeypatch.setattr(KVCache, "_seen", seen)
    found = stable_attention(config, FLOAT)
    assert usual is not None and found is not None
    assert found.length(128) > 128
    assert stable.BLOCK in {found.length(n) for n in range(1, 513)}
