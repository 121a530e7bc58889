"""The KV cache: static rows of keys and values, and attention over what they hold.

One form of attention serves prefill and decode: the queries of one kv head, new tokens x the query heads that share
it, are the rows of one matrix, so each key is read once per kv head, and only the positions in use are read.

A query's result must not depend on its company. Kernels choose their summation order by the sizes they are called
with, so sizes are rounded up (masked, hence without effect) to such as give the same bits: query rows to a multiple
of `row_multiple`, cache lengths to `Rounding.length`. Which sizes those are is measured (models.stable), not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig

BLOCK = 512  # keys that torch's fused CPU attention takes at a time; lengths repeat their behaviour from here on


@dataclass(frozen=True, slots=True)
class Rounding:
    """Sizes that attention is called with. `lengths[i]` is what a remainder of i keys (mod BLOCK) is rounded up to."""

    query_rows: int = 1
    lengths: tuple[int, ...] = tuple(range(BLOCK))

    @classmethod
    def allowing(cls, query_rows: int, remainders: Sequence[int]) -> Rounding:
        """Round up to the nearest of `remainders`; BLOCK itself is always allowed."""
        steps = sorted({0, *remainders, BLOCK})
        return cls(query_rows, tuple(min(s for s in steps if s >= i) for i in range(BLOCK)))

    def length(self, used: int) -> int:
        whole, rest = divmod(used, BLOCK)
        return whole * BLOCK + self.lengths[rest]


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` consecutive tokens of one row, beginning at position `start`."""

    row: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


class KVCache:
    """Keys and values of `rows` sequences of up to `length` positions: (layer, row, kv_head, position, head_dim)."""

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        length: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        rounding: Rounding | None = None,
    ) -> None:
        self.rounding = Rounding() if rounding is None else rounding
        self.rows, self.length = rows, length
        # rounded up, so that a row's last positions can be read at a stable length too
        shape = (config.n_layers, rows, config.n_kv_heads, self.rounding.length(length), config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.scale = config.attention_scale
        self.group = config.n_heads // config.n_kv_heads
        # A query at position p sees a mask of p+1 zeros, then -inf: a window into this one vector.
        self.steps = torch.zeros(2 * shape[3], dtype=dtype, device=device)
        self.steps[shape[3] :] = float("-inf")

    @staticmethod
    def bytes_per_row(config: ModelConfig, length: int, dtype: torch.dtype) -> int:
        return 2 * config.n_layers * config.n_kv_heads * length * config.head_dim * dtype.itemsize

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give row `target` the first `length` positions of row `source`."""
        for side in (self.k, self.v):
            side[:, target, :, :length] = side[:, source, :, :length]

    def clear(self, row: int) -> None:
        """Forget a row whose contents can't be trusted (masked positions must at least be finite)."""
        self.k[:, row] = 0
        self.v[:, row] = 0

    def plan(self, segments: Sequence[Segment]) -> Plan:
        """What `attend` needs for one step, worked out once for all layers."""
        masks = [self._mask(s) for s in segments]
        rows = [s.row for s in segments for _ in range(s.count)]
        positions = [p for s in segments for p in range(s.start, s.end)]
        device = self.k.device
        return Plan(
            tuple(segments), tuple(masks), torch.tensor(rows, device=device), torch.tensor(positions, device=device)
        )

    def _mask(self, s: Segment) -> Tensor:
        """Added to the scores of a segment: (query rows, keys), or (1, keys) when all rows see the same."""
        length = self.rounding.length(s.end)
        if s.count == 1:
            first = self.k.shape[3] - s.end
            return self.steps[first : first + length][None]
        seen = torch.arange(length, device=self.k.device) <= torch.arange(s.start, s.end, device=self.k.device)[:, None]
        mask = torch.zeros(s.count, length, dtype=self.k.dtype, device=self.k.device)
        mask = mask.masked_fill_(~seen, float("-inf")).repeat_interleave(self.group, 0)
        return F.pad(mask, (0, 0, 0, -mask.shape[0] % self.rounding.query_rows))

    def attend(self, plan: Plan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values, then let every query see its row up to its own position.

        q (N, H, E), k and v (N, K, E), in the order of the plan's segments; returns (N, H, E). Tokens beyond the plan's
        are padding: not stored, their result zero.
        """
        keys, values = self.k[layer], self.v[layer]  # (R, K, P, E)
        used = len(plan.rows)
        keys.transpose(1, 2)[plan.rows, plan.positions] = k[:used]
        values.transpose(1, 2)[plan.rows, plan.positions] = v[:used]
        out = torch.zeros_like(q)
        first = 0
        for s, mask in zip(plan.segments, plan.masks, strict=True):
            last, length = first + s.count, mask.shape[1]
            out[first:last] = self._seen(q[first:last], keys[s.row, :, :length], values[s.row, :, :length], mask)
            first = last
        return out

    def _seen(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """One segment: what q (T, H, E) gets from k and v (K, L, E)."""
        count, kv_heads = len(q), len(k)
        rows = count * self.group
        folded = q.unflatten(1, (kv_heads, self.group)).transpose(0, 1).flatten(1, 2)  # (K, T*group, E)
        folded = F.pad(folded, (0, 0, 0, -rows % self.rounding.query_rows))
        seen = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=mask, scale=self.scale)[0]
        return seen[:, :rows].unflatten(1, (count, self.group)).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's tokens: where they go, and one mask per segment."""

    segments: tuple[Segment, ...]
    masks: tuple[Tensor, ...]
    rows: Tensor  # (N,)
    positions: Tensor  # (N,)
