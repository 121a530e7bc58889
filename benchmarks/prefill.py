"""Prompt speed, as it is and quantized, interleaved.

python -m benchmarks.prefill [MODEL] [--tokens 256] [--rounds 5]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import click

import torchchat
from benchmarks.measure import alternate, report
from engine.types import LoadOptions, SamplingParams


@click.command()
@click.argument("model", default="smollm2")
@click.option("--tokens", default=256, show_default=True, help="Prompt tokens, computed in one step.")
@click.option("--rounds", default=5, show_default=True)
def main(model: str, tokens: int, rounds: int) -> None:
    """Prefill tok/s of MODEL in its own precision, int8 and int4."""
    options, path = torchchat.prepare(LoadOptions(model=model, max_batch=1))
    import generate
    from models.cache import Segment

    def run(quantize: str | None) -> Callable[[], float]:
        runner = generate.load(replace(options, quantize=quantize), path, SamplingParams()).engine.runner

        def timed() -> float:
            started = time.perf_counter()
            runner.forward([Segment(0, 0, tokens)], [100] * tokens, [tokens - 1])
            return tokens / (time.perf_counter() - started)

        return timed

    runs = {kind or "not quantized": run(kind) for kind in (None, "int8", "int4")}
    report(alternate(runs, rounds), "tok/s", against="not quantized")


if __name__ == "__main__":
    main()
