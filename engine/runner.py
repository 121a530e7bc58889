"""The unit of computation: some tokens of some rows in, logits out. The one place that compiles."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
import subprocess
import weakref
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any

import torch
from torch import Tensor

from models.cache import KVCache, Plan, Segment
from models.quantize import is_quantized
from models.transformer import Transformer

logger = logging.getLogger("torchchat.runner")

# (ids (N,), positions (N,), select (S,)) -> logits (S, V)
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class Runner:
    """Runs the model over the cache. Called by the engine thread only.

    `row_multiple`: tokens are padded to a multiple of it, for kernels whose result for a row depends on their number.
    `compile`: None for eager, "default", or "max" to let the compiler try several kernels for each product.
    """

    def __init__(
        self, model: Transformer, cache: KVCache, *, row_multiple: int = 1, compile: str | None = None
    ) -> None:
        self.model, self.cache, self.row_multiple = model, cache, row_multiple
        self.device = cache.k.device
        self.plan: Plan  # this step's; set by forward before the model runs
        self._forward: Forward = self._eager
        self._mode, self.compiled = compile, False

    @torch.inference_mode()
    def forward(self, segments: List[Segment], tokens: List[int], wanted: List[int]) -> Tensor:
        """Compute `tokens`, the segments' in order, and give the logits (S, V) of the indices `wanted` among them."""
        self.plan = self.cache.plan(segments)
        ids = torch.tensor(self._padded(tokens), device=self.device)
        positions = self.plan.positions.new_zeros(len(ids))
        positions[: len(tokens)] = self.plan.positions
        select = torch.tensor(self._padded(wanted), device=self.device)
        return self._forward(ids, positions, select)[: len(wanted)]

    def _padded(self, items: List[int]) -> list[int]:
        """At least one, and a multiple of row_multiple. Compiled code has one form for two and more: at least two."""
        count = -(-max(len(items), 2 if self.compiled else 1) // self.row_multiple) * self.row_multiple
        return [*items, *[0] * (count - len(items))]

    def _eager(self, ids: Tensor, positions: Tensor, select: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.cache.attend(self.plan, layer, q, k, v)

        return self.model(ids, positions, select, attend)

    def copy(self, source: int, target: int, length: int) -> None:
        self.cache.copy_prefix(source, target, length)

    def clear(self, row: int) -> None:
        self.cache.clear(row)

    def warm_up(self) -> None:
        """Compile if asked to, and run once, so that the first request doesn't pay for first times."""
        if self._mode is None:
            self._try_out()
        else:
            self._compile(self._mode)

    def _try_out(self) -> None:
        # three different sizes: the compiler takes equal ones for the same number
        count = min(5, self.cache.length)
        self.forward([Segment(0, 0, count)], [0] * count, list(range(count // 2, count)))
        self.forward([Segment(0, count - 1, 1)], [0], [0])

    def is_stable(self) -> bool:
        """Whether tokens come out with the same bits one by one, in pieces and all at once. Uses row 0."""
        cuts = sorted({min(cut, self.cache.length) for cut in (0, 1, 3, 8, 40)})
        whole = self._span(0, cuts[-1]).clone()
        return torch.equal(torch.cat([self._span(*piece) for piece in itertools.pairwise(cuts)]), whole)

    def _span(self, start: int, end: int) -> Tensor:
        """Logits of all positions from `start` to `end` of row 0, whose tokens are all the same."""
        count = end - start
        return self.forward([Segment(0, start, count)], [1] * count, list(range(count)))

    def _compile(self, mode: str) -> None:
        """One graph for any number of tokens, attention a call out of it. No working compiler: eager, and said."""
        if self.device.type == "cpu" and not _has_compiler():
            logger.warning("--compile: there is no C++ compiler (CXX, or g++) that works; running without it")
            return
        import torch._inductor.config as inductor

        number = next(_numbers)
        _runners[number] = self
        attend_op = _attend_op()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_op(q, k, v, layer, number)

        def forward(ids: Tensor, positions: Tensor, select: Tensor) -> Tensor:
            return self.model(ids, positions, select, attend)

        options: dict[str, Any] = {"max_autotune": True} if mode == "max" else {}
        self._forward, self.compiled = torch.compile(forward, dynamic=True, fullgraph=True, options=options), True
        # Frozen weights let float products be packed; quantized ones it would turn back into floats.
        freezing = self.device.type == "cpu" and not is_quantized(self.model)
        try:
            with inductor.patch(freezing=freezing):
                self._try_out()
        except Exception as error:  # noqa: BLE001 - the compiler raises anything; the model runs without it
            reason = _reason(error)
            logger.warning("--compile: the compiler failed (%s); running without it", reason)
            self._forward, self.compiled = self._eager, False


# A compiled graph carries tensors and numbers only, so attention finds its runner by number.
_runners: weakref.WeakValueDictionary[int, Runner] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@functools.cache
def _attend_op() -> Callable[[Tensor, Tensor, Tensor, int, int], Tensor]:
    """KVCache.attend as an operator that the compiler leaves alone: it writes to the cache, unseen by the graph."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, runner: int) -> Tensor:
        live = _runners[runner]
        return live.cache.attend(live.plan, layer, q, k, v)

    schema = "(Tensor q, Tensor k, Tensor v, int layer, int runner) -> Tensor"
    op = torch.library.custom_op("torchchat::attend", attend, mutates_args=(), schema=schema)
    op.register_fake(lambda q, k, v, layer, runner: torch.empty_like(q))
    return op


def _has_compiler() -> bool:
    """Whether the C++ compiler that torch would call answers at all: finding out by compiling takes a minute."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return compiler is not None and subprocess.run([compiler, "--version"], capture_output=True).returncode == 0


def _reason(error: BaseException) -> str:
    """What went wrong at the bottom of a compiler's error, in one line."""
    inner = getattr(error, "inner_exception", error.__cause__)
    if inner is not None:
        return _reason(inner)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
