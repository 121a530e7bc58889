"""What quantizing costs in quality: perplexity of a text, and how often the likeliest token stays the same.

python -m benchmarks.quality [MODEL] [--text FILE] [--quantize int8,int4,...]
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import click

import torchchat
from engine.types import LoadOptions, SamplingParams

WINDOW = 512  # tokens scored at a time


@click.command()
@click.argument("model", default="smollm2")
@click.option("--text", type=click.Path(exists=True, path_type=Path), default=Path("README.md"), show_default=True)
@click.option("--quantize", "kinds", multiple=True, default=("int8", "int4"), show_default=True)
@click.option("--dtype", default="auto", show_default=True)
def main(model: str, text: Path, kinds: tuple[str, ...], dtype: str) -> None:
    """Perplexity of MODEL on a text, as it is and quantized."""
    options, path = torchchat.prepare(LoadOptions(model=model, max_batch=1, dtype=dtype))
    import torch

    import generate
    from models.cache import Segment

    words = text.read_text(encoding="utf-8")
    exact: list[torch.Tensor] = []
    base = math.nan
    for kind in (None, *kinds):
        service = generate.load(replace(options, quantize=kind), path, SamplingParams())
        ids = service.tokenizer.encode(words)
        windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - 1, WINDOW)]
        losses, same, likeliest = [], 0, []
        for window in windows:
            logits = service.engine.runner.forward([Segment(0, 0, len(window))], window, list(range(len(window))))
            following = torch.tensor(window[1:])
            losses.append(torch.nn.functional.cross_entropy(logits[:-1], following, reduction="sum"))
            likeliest.append(logits.argmax(-1))
        perplexity = math.exp(float(sum(losses)) / sum(len(w) - 1 for w in windows))
        if kind is None:
            exact, base = likeliest, perplexity
        same = sum(int((a == b).sum()) for a, b in zip(exact, likeliest, strict=True))
        print(
            f"{kind or 'not quantized':24} perplexity {perplexity:8.3f} ({perplexity / base - 1:+.2%})"
            f"   same likeliest token {same / len(ids):.1%}"
        )
        service.close()


if __name__ == "__main__":
    main()
