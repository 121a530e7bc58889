"""The compiled runner computes what the eager one does, at every number of tokens, with one compilation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runner import Runner
from models.build import build_model
from models.cache import KVCache, Segment
from models.checkpoints import open_checkpoint
from models.quantize import parse_quantization
from models.stable import stable_attention, stable_rows
from tests import tiny


def runner(folder: Path, quantize: str | None = None, context: int = 128, **options: Any) -> Runner:
    config = tiny.tiny_config(n_layers=1)
    path = tiny.write_llama2c(folder / "model.bin", config, tiny.random_tensors(config))
    model = build_model(
        open_checkpoint(path), dtype=torch.float32, quantization=parse_quantization(quantize), context_length=context
    )
    with torch.inference_mode():
        rounding, multiple = stable_attention(config, torch.float32), stable_rows(model, torch.float32)
    assert rounding is not None and multiple is not None
    cache = KVCache(config, 3, context, dtype=torch.float32, rounding=rounding)
    made = Runner(model, cache, row_multiple=multiple, **options)
    made.warm_up()
    return made


def logits(made: Runner, pieces: list[int]) -> torch.Tensor:
    """Logits of 40 tokens in row 1, fed in `pieces`, while row 2 takes one token a step."""
    tokens, found, start = [(7 * i) % 300 for i in range(40)], [], 0
    for step, count in enumerate(pieces):
        segments = [Segment(1, start, count), Segment(2, step, 1)]
        found.append(made.forward(segments, [*tokens[start : start + count], 9], list(range(count))))
        start += count
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "quantize"), [("default", None), ("max", None), ("default", "int8"), ("max", "int4")])
def test_compiled_equals_eager(tmp_path: Path, mode: str, quantize: str | None) -> None:
    eager, compiled = runner(tmp_path, quantize), runner(tmp_path, quantize, compile=mode)
    assert compiled.compiled
    expected = logits(eager, [40])
    # quantized layers round their inputs, and a last bit of these can tip the rounding
    allowed = 2e-5 if quantize is None else 3e-2
    torch.testing.assert_close(logits(compiled, [40]), expected, atol=allowed, rtol=0)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for pieces in ([1] * 40, [3, 1, 16, 20], [39, 1]):
        torch.testing.assert_close(logits(compiled, pieces), expected, atol=allowed, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "a step compiled again"


@pytest.mark.slow
def test_compiled_is_bitwise_stable(tmp_path: Path) -> None:
    made = runner(tmp_path, compile="default")
    expected = logits(made, [40])
    assert all(torch.equal(logits(made, pieces), expected) for pieces in ([1] * 40, [3, 1, 16, 20], [39, 1]))
    assert made.is_stable()


def test_an_unstable_model_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(tmp_path)
    assert made.is_stable()
    forward = made.model.forward
    monkeypatch.setattr(made.model, "forward", lambda ids, *rest: forward(ids, *rest) + 1e-6 * len(ids))
    assert not made.is_stable()


def test_without_a_compiler_it_runs_eager_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise RuntimeError("no C++ compiler was found")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING):
        made = runner(tmp_path, compile="default")
    assert not made.compiled
    assert "no C++ compiler was found" in caplog.text
    assert torch.equal(logits(made, [40]), logits(runner(tmp_path), [40]))


@pytest.mark.parametrize("context", [1, 2, 3, 5, 6, 39, 41])
def test_any_context_can_be_tried_out(tmp_path: Path, context: int) -> None:
    assert runner(tmp_path, context=context).is_stable()


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false"])
def test_a_compiler_that_does_not_work_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(torch, "compile", None)  # it is not even asked
    with caplog.at_level(logging.WARNING):
        assert not runner(tmp_path, compile="default").compiled
    assert "no C++ compiler" in caplog.text
