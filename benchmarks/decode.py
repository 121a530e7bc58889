"""Decode speed through the engine, against transformers' generate() on the same weights.

    python -m benchmarks.decode [MODEL] [--batch 1,8] [--peer transformers] [--deterministic/--no-deterministic] ...

tok/s of all rows together, first token excluded. Greedy, end tokens ignored, prompts of 16 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

import torchchat
from benchmarks.measure import alternate, report
from engine.types import DEFAULT_SAMPLING, LoadOptions, Request, SamplingParams

PROMPT = list(range(100, 116))


def engine_run(service: Any, rows: int, tokens: int) -> Callable[[], float]:
    """tok/s of `rows` different requests from the first event to the last."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens).over(DEFAULT_SAMPLING)
    requests = [Request([*PROMPT, 200 + i], params) for i in range(rows)]

    def run() -> float:
        counts, started, begun = 0, 0.0, set()
        for item in service.engine.submit(requests):
            if item is None or item[1].token_id is None:
                continue
            begun.add(item[0])
            if len(begun) == rows:  # from here on all rows decode
                counts += 1
                started = started if counts > 1 else time.perf_counter()
        return (counts - 1) / (time.perf_counter() - started)

    return run


def transformers_run(path: Any, tokens: int) -> Callable[[], float]:
    """tok/s of generate() on one prompt: a long run less a run of one token."""
    import torch

    from models.checkpoints import open_checkpoint
    from tests.peer import peer_model

    checkpoint = open_checkpoint(path)
    model = peer_model(checkpoint.config, {name: t.read().float() for name, t in checkpoint.tensors.items()})
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([[*PROMPT, 200]])

    def timed(count: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        assert out.shape[1] == ids.shape[1] + count
        return time.perf_counter() - started

    return lambda: (tokens - 1) / (timed(tokens) - timed(1))


@click.command()
@click.argument("model", default="smollm2")
@click.option("--batch", default="1,8", show_default=True, help="Rows, separated by commas.")
@click.option("--tokens", default=48, show_default=True, help="Tokens per row.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--peer", type=click.Choice(["transformers"]), help="What else to run, interleaved.")
@click.option("--quantize")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--compile", "mode", type=click.Choice(["default", "max"]))
@click.option("--deterministic/--no-deterministic", default=None)
@click.option("--compare-deterministic", is_flag=True, help="Run with and without --deterministic, interleaved.")
def main(
    model: str,
    batch: str,
    tokens: int,
    rounds: int,
    peer: str | None,
    compare_deterministic: bool,
    mode: str | None,
    **given: Any,
) -> None:
    """Decode tok/s of MODEL."""
    sizes = [int(size) for size in batch.split(",")]
    options = LoadOptions(model=model, max_batch=max(sizes), compile=mode, **given)
    options, path = torchchat.prepare(options)
    import generate

    def load(options: LoadOptions) -> Any:
        return generate.load(options, path, SamplingParams())

    runs: dict[str, Callable[[], float]] = {}
    if compare_deterministic:
        for wanted in (True, False):
            service = load(replace(options, deterministic=wanted))
            name = "deterministic" if wanted else "not deterministic"
            runs |= {f"{name}, batch {size}": engine_run(service, size, tokens) for size in sizes}
    else:
        service = load(options)
        runs |= {f"torchchat, batch {size}": engine_run(service, size, tokens) for size in sizes}
    if peer is not None:
        runs["transformers, batch 1"] = transformers_run(path, tokens)
    found = alternate(runs, rounds)
    report(found, "tok/s", against=list(runs)[-1] if peer is not None else next(iter(runs)))


if __name__ == "__main__":
    main()
