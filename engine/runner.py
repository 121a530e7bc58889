"""The unit of computation: some tokens of some rows in, logits out. The one place that compiles."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

from models.cache import KVCache, Segment
from models.transformer import Transformer


class Runner:
    """Runs the model over the cache. Called by the engine thread only.

    `row_multiple`: tokens are padded to a multiple of it, for kernels whose result for a row depends on their number.
    """

    def __init__(
        self, model: Transformer, cache: KVCache, *, row_multiple: int = 1, compile: str | None = None
    ) -> None:
        self.model, self.cache, self.row_multiple = model, cache, row_multiple
        self.device = cache.k.device
        self._forward = model.forward

    @torch.inference_mode()
    def forward(self, segments: List[Segment], tokens: List[int], wanted: List[int]) -> Tensor:
        """Compute `tokens`, the segments' in order, and give the logits (S, V) of the indices `wanted` among them."""
        plan = self.cache.plan(segments)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.cache.attend(plan, layer, q, k, v)

        ids = torch.tensor(self._padded(tokens), device=self.device)
        positions = plan.positions.new_zeros(len(ids))
        positions[: len(tokens)] = plan.positions
        select = self._padded(wanted)
        chosen = None if select == list(range(len(ids))) else torch.tensor(select, device=self.device)
        return self._forward(ids, positions, chosen, attend)[: len(wanted)]

    def _padded(self, items: List[int]) -> list[int]:
        """At least one, and a multiple of row_multiple."""
        count = -(-max(len(items), 1) // self.row_multiple) * self.row_multiple
        return [*items, *[0] * (count - len(items))]

    def copy(self, source: int, target: int, length: int) -> None:
        self.cache.copy_prefix(source, target, length)

    def clear(self, row: int) -> None:
        self.cache.clear(row)

    def warm_up(self) -> None:
        """Run once, so that the first request doesn't pay for first times."""
        self.forward([Segment(0, 0, 2)], [0, 0], [1])
        self.forward([Segment(0, 2, 1)], [0], [0])
