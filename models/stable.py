"""Which sizes give the same bits whatever the company: measured on this machine for this model.

Matrix kernels pick their summation order by the sizes they are called with, so the same row can come out with other
low bits in a batch of one than in a batch of eight. Which sizes agree depends on the library, the processor and
the number of threads; so the candidates are tried on random numbers, and the first that agree everywhere are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from models.cache import BLOCK, KVCache, Rounding, Segment
from models.config import ModelConfig
from models.transformer import Transformer

ROW_MULTIPLES = (1, 4, 8, 16)
_LENGTH_STEP = 64
_WORK = 2 * 10**9  # multiplications that trying one part may take


def stable_rows(model: Transformer, dtype: torch.dtype) -> int | None:
    """Pad the number of tokens to a multiple of this and every product treats a row alike; None: nothing helps."""
    linears: dict[Any, Any] = {(type(m), m.in_features, m.out_features): m for m in model.modules() if _is_linear(m)}
    parts = [(m, width, width * height) for (_, width, height), m in linears.items()]
    config, block = model.config, next(iter(model.layers))
    parts.append((block.feed_forward, config.dim, 3 * config.dim * config.hidden_dim))
    return next((m for m in ROW_MULTIPLES if all(_agrees(*part, m, dtype) for part in parts)), None)


def _is_linear(module: nn.Module) -> bool:
    return hasattr(module, "in_features")


def _agrees(part: nn.Module, width: int, products: int, multiple: int, dtype: torch.dtype) -> bool:
    """Whether `part` gives the last n of many rows of `width` the same bits for every n tried."""
    most = max(48, min(256, _WORK // products))  # as many as a step takes, but a large model's must not take long
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((most, width), generator=generator).to(dtype)
    whole = part(rows)
    counts = sorted({-(-n // multiple) * multiple for n in (1, 2, 3, 5, 7, 8, 16, 17, 33)})
    return all(torch.equal(part(rows[-n:]), whole[-n:]) for n in counts)


def stable_attention(config: ModelConfig, dtype: torch.dtype) -> Rounding | None:
    """Sizes at which one query's attention equals its place in any chunk; None if there are none."""
    group = config.n_heads // config.n_kv_heads  # kv heads are apart from each other: one tells all
    trial = _Trial(replace(config, n_layers=1, n_heads=group, n_kv_heads=1), dtype)
    for query_rows in ROW_MULTIPLES[1:]:  # fewer than four rows depend on where they lie in memory, too
        lengths = [n for n in range(_LENGTH_STEP, BLOCK, _LENGTH_STEP) if trial.length_agrees(query_rows, n)]
        rounding = Rounding.allowing(query_rows, lengths)
        if trial.chunks_agree(rounding):
            return rounding
    return None


class _Trial:
    """Random queries, keys and values for one layer, attended to in different pieces."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config, self.dtype, self.tokens = config, dtype, BLOCK + 150
        generator = torch.Generator().manual_seed(0)

        def heads(count: int) -> Tensor:
            return torch.randn(self.tokens, count, config.head_dim, generator=generator).to(dtype)

        self.q, self.k, self.v = heads(config.n_heads), heads(config.n_kv_heads), heads(config.n_kv_heads)

    def attend(self, cache: KVCache, start: int, count: int) -> Tensor:
        piece = slice(start, start + count)
        return cache.attend(cache.plan([Segment(0, start, count)]), 0, self.q[piece], self.k[piece], self.v[piece])

    def cache(self, rounding: Rounding, filled: int = 0) -> KVCache:
        cache = KVCache(self.config, 1, self.tokens, dtype=self.dtype, rounding=rounding)
        cache.k[0, 0, :, :filled] = self.k[:filled].transpose(0, 1)
        cache.v[0, 0, :, :filled] = self.v[:filled].transpose(0, 1)
        return cache

    def length_agrees(self, query_rows: int, length: int) -> bool:
        """Whether reading `length` keys gives the bits that reading BLOCK keys gives."""
        exact = self.cache(Rounding.allowing(query_rows, [length]), length)
        block = self.cache(Rounding.allowing(query_rows, []), length)
        return all(
            torch.equal(self.attend(exact, p, 1), self.attend(block, p, 1)) for p in {length - 1, length - _LENGTH_STEP}
        )

    def chunks_agree(self, rounding: Rounding) -> bool:
        whole = self.cache(rounding)
        expected = self.attend(whole, 0, self.tokens)
        return all(torch.equal(self.attend(whole, i, n), expected[i : i + n]) for i, n in self._pieces())

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.tokens - 1, 37):
            yield start, 1
        for count in (2, 3, 5, 16, 64, 100, 256):
            yield from ((start, min(count, self.tokens - start)) for start in range(0, self.tokens, 211))
