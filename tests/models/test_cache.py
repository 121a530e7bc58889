"""Attention over cached rows is plain attention, whatever the sizes it is rounded to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from models.cache import BLOCK, KVCache, Rounding, Segment
from models.config import ModelConfig
from tests import tiny

ROUNDINGS = {
    "exact": Rounding(),
    "rows of 8": Rounding.allowing(8, range(BLOCK)),
    "lengths of 64": Rounding.allowing(4, range(0, BLOCK, 64)),
    "whole blocks": Rounding.allowing(16, []),
}


def make(rounding: Rounding | None = None, length: int = 40, rows: int = 3, **overrides: Any) -> KVCache:
    return KVCache(tiny.tiny_config(**overrides), rows, length, dtype=torch.float32, rounding=rounding)


def noise(count: int, heads: int, seed: int) -> Tensor:
    return torch.randn(count, heads, 16, generator=torch.Generator().manual_seed(seed))


def naive(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """Query i of (T, H, E) sees keys 0..start+i of (L, K, E); one by one, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys, values = (t[: start + i + 1, head // group].double() for t in (k, v))
            out[i, head] = (keys @ q[i, head].double() * scale).softmax(0) @ values
    return out.float()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    "overrides", [{}, {"n_kv_heads": 4}, {"n_kv_heads": 1}, {"attention_multiplier": 0.7}], ids=str
)
def test_attend_is_attention(overrides: dict[str, Any], rounding: str) -> None:
    """A sequence in pieces, beside another row's that must not be seen."""
    cache = make(ROUNDINGS[rounding], **overrides)
    config = tiny.tiny_config(**overrides)
    q, k, v = noise(40, 4, 1), noise(40, config.n_kv_heads, 2), noise(40, config.n_kv_heads, 3)
    other = noise(40, 4, 4), noise(40, config.n_kv_heads, 5), noise(40, config.n_kv_heads, 6)
    expected = naive(q, k, v, 0, config.attention_scale)
    others = naive(*other, 0, config.attention_scale)
    for start, end in pairwise((0, 7, 8, 9, 30, 40)):
        step = slice(start, end)
        plan = cache.plan([Segment(0, start, end - start), Segment(2, start, end - start)])
        both = (torch.cat((a[step], b[step])) for a, b in zip((q, k, v), other, strict=True))
        found = cache.attend(plan, 1, *both)
        torch.testing.assert_close(found, torch.cat((expected[step], others[step])), atol=2e-6, rtol=0)
    assert not cache.k[0].any() and not cache.v[0].any()  # the other layer's
    assert not cache.k[:, 1].any()  # the row between


def test_a_query_sees_what_the_row_held_before() -> None:
    """Old, longer contents of a reused row are overwritten or masked."""
    cache = make()
    cache.k.fill_(50.0)
    cache.v.fill_(-3.0)
    q, k, v = noise(5, 4, 1), noise(5, 2, 2), noise(5, 2, 3)
    found = cache.attend(cache.plan([Segment(1, 0, 5)]), 0, q, k, v)
    torch.testing.assert_close(found, naive(q, k, v, 0, 0.25), atol=2e-6, rtol=0)


def test_padding_is_neither_stored_nor_answered() -> None:
    cache = make()
    q, k, v = noise(8, 4, 1), noise(8, 2, 2), noise(8, 2, 3)
    found = cache.attend(cache.plan([Segment(0, 0, 2), Segment(1, 0, 1)]), 0, q, k, v)
    torch.testing.assert_close(found[:2], naive(q[:2], k[:2], v[:2], 0, 0.25), atol=2e-6, rtol=0)
    assert not found[3:].any()
    assert torch.equal(cache.k[0, 0, :, :2], k[:2].transpose(0, 1)) and not cache.k[0, 0, :, 2:].any()
    assert torch.equal(cache.v[0, 1, :, :1], v[2:3].transpose(0, 1)) and not cache.v[0, 2].any()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_last_positions_can_be_read(rounding: str) -> None:
    """Lengths are rounded up past the row's end: the cache has the room."""
    cache = make(ROUNDINGS[rounding], length=100)
    assert (cache.rows, cache.length) == (3, 100)
    q, k, v = noise(100, 4, 1), noise(100, 2, 2), noise(100, 2, 3)
    cache.attend(cache.plan([Segment(2, 0, 99)]), 0, q[:99], k[:99], v[:99])
    found = cache.attend(cache.plan([Segment(2, 99, 1)]), 0, q[99:], k[99:], v[99:])
    torch.testing.assert_close(found, naive(q[99:], k, v, 99, 0.25), atol=2e-6, rtol=0)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_masks_let_through_each_querys_own_past(rounding: str) -> None:
    cache = make(ROUNDINGS[rounding])
    for s in (Segment(0, 0, 1), Segment(1, 38, 1), Segment(2, 3, 5)):
        (mask,) = cache.plan([s]).masks
        rounded = ROUNDINGS[rounding].length(s.end)
        assert mask.shape[1] == rounded >= s.end
        seen = mask == 0
        assert torch.equal(~seen, mask == float("-inf"))
        if s.count == 1:
            assert torch.equal(seen, (torch.arange(rounded) < s.end)[None])
            continue
        assert mask.shape[0] % ROUNDINGS[rounding].query_rows == 0
        for i in range(s.count):  # the two query heads of a kv head lie side by side
            for row in (2 * i, 2 * i + 1):
                assert torch.equal(seen[row], torch.arange(rounded) <= s.start + i)
        assert seen.any(1).all()  # a query that sees nothing would be NaN


def test_plan_says_where_tokens_go() -> None:
    plan = make().plan([Segment(2, 5, 3), Segment(0, 0, 1)])
    assert plan.rows.tolist() == [2, 2, 2, 0] and plan.positions.tolist() == [5, 6, 7, 0]
    assert plan.segments[0].end == 8 and len(plan.masks) == 2


def filled() -> KVCache:
    cache = make(rows=3)
    for side, seed in ((cache.k, 1), (cache.v, 2)):
        side.copy_(torch.randn(side.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


def test_copy_prefix() -> None:
    cache, before = filled(), filled()
    cache.copy_prefix(0, 2, 11)
    for now, then in ((cache.k, before.k), (cache.v, before.v)):
        assert torch.equal(now[:, 2, :, :11], then[:, 0, :, :11])
        assert torch.equal(now[:, 2, :, 11:], then[:, 2, :, 11:])
        assert torch.equal(now[:, :2], then[:, :2])


def test_clear_makes_a_broken_row_finite() -> None:
    cache, before = filled(), filled()
    cache.k[:, 1], cache.v[:, 1] = float("nan"), float("inf")
    cache.clear(1)
    assert not cache.k[:, 1].any() and not cache.v[:, 1].any()
    assert torch.equal(cache.k[:, ::2], before.k[:, ::2])
    q, k, v = noise(1, 4, 1), noise(1, 2, 2), noise(1, 2, 3)
    assert cache.attend(cache.plan([Segment(1, 0, 1)]), 0, q, k, v).isfinite().all()


def test_rounding() -> None:
    assert [Rounding().length(n) for n in (1, 63, 512, 513, 5000)] == [1, 63, 512, 513, 5000]
    some = Rounding.allowing(4, [64, 192])
    assert [some.length(n) for n in (1, 64, 65, 192, 193, 512)] == [64, 64, 192, 192, 512, 512]
    assert [some.length(n) for n in (513, 576, 577, 1024, 1025)] == [576, 576, 704, 1024, 1088]
    for rounding in (*ROUNDINGS.values(), some):
        for used in range(1, 3 * BLOCK):
            length = rounding.length(used)
            assert used <= length <= used + BLOCK and rounding.length(length) == length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bytes_per_row(dtype: torch.dtype) -> None:
    config: ModelConfig = tiny.tiny_config()
    cache = KVCache(config, 3, 40, dtype=dtype)
    assert cache.k.nbytes + cache.v.nbytes == 3 * KVCache.bytes_per_row(config, 40, dtype)
    assert cache.k.dtype == cache.v.dtype == dtype
