"""kernels.c against its twin in PyTorch, and what happens without a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import kernels

SHAPES = [(32, 1), (64, 7), (576, 103), (1536, 64), (96, 50)]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The PyTorch form."""
    monkeypatch.setenv("TORCHCHAT_KERNELS", "0")
    kernels.library.cache_clear()
    yield
    kernels.library.cache_clear()


def int8(width: int, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    weight = torch.randint(-127, 128, (rows, width), dtype=torch.int8, generator=generator)
    return weight, torch.rand(rows, generator=generator)


def int4(width: int, rows: int, generator: torch.Generator, group: int = 32) -> tuple[Tensor, ...]:
    q = torch.randint(0, 16, (rows, width), dtype=torch.uint8, generator=generator)
    scale, offset = torch.rand(2, rows, width // group, 1, generator=generator).half()
    return kernels.pack_int4(q), scale, -offset


PRODUCTS = [(kernels.linear_int8, int8), (kernels.linear_int4, int4)]


def results(width: int, rows: int, tokens: int) -> list[Tensor]:
    """Both products, with and without bias, of the same random numbers."""
    found = []
    for product, make in PRODUCTS:
        generator = torch.Generator().manual_seed(width + rows)
        stored, x = make(width, rows, generator), torch.randn(tokens, width, generator=generator)
        x[0, : width // 2] = 0
        found += [product(x, *stored, bias) for bias in (None, torch.randn(rows, generator=generator))]
    return found


@pytest.mark.parametrize(("width", "rows"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 50, 100])
def test_c_equals_pytorch(width: int, rows: int, tokens: int, request: pytest.FixtureRequest) -> None:
    assert kernels.library() is not None, "this machine has a compiler"
    fast = results(width, rows, tokens)
    request.getfixturevalue("without")
    assert kernels.library() is None
    for ours, twin in zip(fast, results(width, rows, tokens), strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-5 * float(twin.abs().max()))


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_int4_groups(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    stored = int4(512, 40, generator, group)
    x = torch.randn(9, 512, generator=generator)
    expected = kernels.rounded(x) @ kernels.unpack_int4(*stored).T
    torch.testing.assert_close(kernels.linear_int4(x, *stored, None), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("product", "make"), PRODUCTS)
def test_a_token_has_the_same_bits_in_any_company(product, make) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(3)
    stored, x = make(576, 103, generator), torch.randn(120, 576, generator=generator)
    whole = product(x, *stored, None)
    for count in (1, 2, 3, 4, 7, 47, 48, 49, 97):
        for start in (0, 5, 120 - count):
            assert torch.equal(product(x[start : start + count].contiguous(), *stored, None), whole[start:][:count])


def test_a_token_of_zeros_gives_the_bias() -> None:
    for product, make in PRODUCTS:
        stored, bias = make(64, 5, torch.Generator().manual_seed(0)), torch.arange(5.0)
        assert torch.equal(product(torch.zeros(2, 64), *stored, bias), bias.expand(2, 5))


def test_packing_is_undone() -> None:
    q = torch.randint(0, 16, (6, 128), dtype=torch.uint8)
    ones, none = torch.ones(6, 4, 1).half(), torch.zeros(6, 4, 1).half()
    assert torch.equal(kernels.unpack_int4(kernels.pack_int4(q), ones, none), q.float())


def test_without_a_compiler_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHCHAT_CACHE", str(tmp_path))
    for compiler in ("/nowhere/cc", "false"):
        monkeypatch.setenv("CC", compiler)
        kernels.library.cache_clear()
        caplog.clear()
        assert kernels.library() is None
        assert "run in PyTorch, more slowly" in caplog.text
    kernels.library.cache_clear()


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCHAT_CACHE", str(tmp_path))
    kernels.library.cache_clear()
    assert kernels.library() is not None
    (made,) = tmp_path.iterdir()
    monkeypatch.setenv("CC", "false")  # would fail if it were asked
    kernels.library.cache_clear()
    monkeypatch.setenv("CC", "true")  # would leave nothing behind
    assert kernels.library() is not None
    assert list(tmp_path.iterdir()) == [made]
    kernels.library.cache_clear()
