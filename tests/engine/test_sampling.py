"""Sampling against its definition: engine.reference's loops, exact distributions, rows that don't see each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import reference
from engine.sampling import adjust, adjusts, choose, logprobs, uniform, usable
from engine.types import SamplingParams
from tests.engine.lab import params

DRAWN = {"temperature": 1.0}
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.4},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 7},
    "top_k, all": {"top_k": 10_000},
    "top_k, minus one": {"top_k": -1},
    "top_p": {"top_p": 0.7},
    "top_p, nearly all": {"top_p": 0.999999},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
}


def random_logits(rows: int, vocabulary: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def likeliest_first(row: Tensor) -> list[int]:
    return row.sort(descending=True, stable=True).indices.tolist()


@given(
    # whole and half numbers, so that ties are common
    row=st.lists(st.integers(-12, 12).map(lambda x: x / 2), min_size=2, max_size=40),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.integers(-1, 45) | st.sampled_from([2**31, 2**63, 10**30]),
    top_p=st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.05, 0.5, 1.0]),
    number=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_a_choice_is_the_definitions(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, number: float
) -> None:
    p = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected, margin = reference.chosen(row, p, number)
    greedy = temperature == 0 or top_k == 1 or top_p == 0 or min_p == 1
    assume(greedy or margin > 1e-6)
    assert choose(torch.tensor([row]), [p], [number]) == [expected]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocabulary", [50, 700])  # fewer and more than the tokens that _nucleus tries first
def test_evenly_spread_numbers_give_exactly_the_distribution(name: str, vocabulary: int) -> None:
    """Inverting a cumulative distribution at (i + 1/2) / N hits each token N p times, give or take one."""
    p, row = params(**{**DRAWN, **FILTERS[name]}), random_logits(1, vocabulary, seed=1, scale=2.0)
    count = 4000
    numbers = [(i + 0.5) / count for i in range(count)]
    drawn = torch.tensor(choose(row.expand(count, -1), [p] * count, numbers))
    kept = row[0].div(p.temperature).double().softmax(-1)
    falling = sorted(kept.tolist(), reverse=True)
    threshold, _ = reference.kept_from(falling, p)
    kept[kept < threshold * (1 - 1e-9)] = 0
    kept /= kept.sum()
    frequencies = torch.bincount(drawn, minlength=vocabulary) / count
    assert (frequencies - kept).abs().max() <= 1.01 / count
    if name in ("top_k", "top_p", "min_p", "all"):
        assert (kept == 0).any()


def test_a_narrow_filter_is_greedy() -> None:
    rows = random_logits(64, 900)
    best = rows.argmax(-1).tolist()
    numbers = [uniform(i, 0, 0) for i in range(64)]
    narrow: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1e-5},
        {"temperature": 1e-30},
        {"top_k": 1},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 0.0, "top_k": 50, "top_p": 0.5},
    ]
    for given_ in narrow:
        assert choose(rows, [params(**{**DRAWN, **given_})] * 64, numbers) == best, given_


def test_greedy_takes_the_first_of_equals() -> None:
    row = torch.zeros(1, 600)
    row[0, [77, 300, 599]] = 2.0
    for given_ in ({"temperature": 0.0}, {**DRAWN, "top_k": 1}, {**DRAWN, "top_p": 0.0}, {**DRAWN, "min_p": 1.0}):
        assert choose(row, [params(**given_)], [0.9]) == [77]


def test_ties_at_the_threshold_stay_in() -> None:
    """Which of several equal tokens is dropped would otherwise depend on how a sort breaks ties."""
    row = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0]])
    for given_ in ({"top_k": 2}, {"top_p": 0.3}, {"top_p": 1e-9}):
        p = params(**{**DRAWN, **given_})
        drawn = [choose(row, [p], [(i + 0.5) / 30])[0] for i in range(30)]
        assert drawn == [0] * 10 + [2] * 10 + [4] * 10


@pytest.mark.parametrize("number", [0.0, 1 - 2**-32])
def test_the_ends_of_the_unit_interval_are_tokens_that_were_kept(number: float) -> None:
    row = torch.tensor([[-50.0, 0.0, 1.0, 0.5, -50.0]])
    expected = 1 if number == 0 else 3
    assert choose(row, [params(temperature=1.0, top_k=3)], [number]) == [expected]
    banned = torch.tensor([[-math.inf, 0.0, -math.inf, 0.5, -math.inf]])
    assert choose(banned, [params(temperature=1.0)], [number]) == [expected]


def some_params(count: int) -> list[SamplingParams]:
    every = [{**DRAWN, **given_} for given_ in FILTERS.values()] + [{}, {"temperature": 1e-5}, {**DRAWN, "top_k": 300}]
    return [params(**every[i % len(every)]) for i in range(count)]


@pytest.mark.parametrize("vocabulary", [3, 255, 256, 257, 1000, 2049])
def test_a_row_does_not_see_its_company(vocabulary: int) -> None:
    """Flat rows, so that nuclei are wide, and numbers next to the borders between tokens, where one bit would show."""
    count = 26
    rows = random_logits(count, vocabulary, seed=3, scale=0.5)
    everyone = some_params(count)
    for i, p in enumerate(everyone):
        cumulative = (rows[i] / max(p.temperature, 1e-5)).double().softmax(-1).cumsum(-1)
        numbers = [min(max(float(cumulative[i * vocabulary // count]), 0.0), 1 - 2**-32)] * count
        alone = choose(rows[i : i + 1], [p], numbers[:1])
        for width in (2, 5, count):
            start = max(0, i - width + 1)
            place = i - start
            company = choose(rows[start : start + width], everyone[start : start + width], numbers[:width])
            assert company[place] == alone[0]


def test_nothing_is_written_to_the_logits() -> None:
    rows = random_logits(13, 300)
    before = rows.clone()
    choose(rows, some_params(13), [0.5] * 13)
    adjust(rows[0], params(logit_bias={1: 5.0}), torch.zeros(300, dtype=torch.bool), torch.zeros(300), [4])
    logprobs(rows[0], 3, 5)
    assert torch.equal(rows, before)


@given(
    seed=st.integers(0, 1000),
    repetition=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    presence=st.sampled_from([0.0, -2.0, 0.7, 2.0]),
    frequency=st.sampled_from([0.0, -0.5, 0.25, 2.0]),
    bias=st.dictionaries(st.integers(0, 19), st.floats(-100, 100, width=32), max_size=4),
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=10),
    output=st.lists(st.integers(0, 19), max_size=12),
    banned=st.sets(st.integers(0, 19), max_size=3),
)
@settings(max_examples=80, deadline=None)
def test_penalties_bias_and_bans(
    seed: int,
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    prompt: list[int],
    output: list[int],
    banned: set[int],
) -> None:
    p = params(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)
    row = random_logits(1, 20, seed)[0]
    seen = torch.zeros(20, dtype=torch.bool)
    seen[prompt] = True
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=20).float()
    ours = adjust(row, p, seen, counts, sorted(banned))
    theirs = reference.adjusted(row.tolist(), p, prompt, output, frozenset(banned))
    assert ours.tolist() == pytest.approx(theirs, abs=1e-4)
    if not adjusts(p) and not banned:
        assert torch.equal(ours, row)


@pytest.mark.parametrize(
    "given_",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {0: 1.0}},
        {"min_tokens": 1},
    ],
)
def test_whatever_changes_a_row_is_known_to(given_: dict[str, Any]) -> None:
    assert adjusts(params(**given_))
    assert not adjusts(params(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=3, logprobs=2))


def test_uniform_stays_what_it_is() -> None:
    """A seed keeps its text from one release to the next."""
    golden = {
        (0, 0, 0): 0.13870941009372473,
        (0, 0, 1): 0.2582654468715191,
        (0, 1, 0): 0.5803592312149704,
        (1, 0, 0): 0.6935121389105916,
        (-5, 0, 0): 0.9356860751286149,
        (2**63 - 1, 3, 4095): 0.2629258066881448,
    }
    assert {arguments: uniform(*arguments) for arguments in golden} == golden


def test_uniform_is_uniform_and_tells_its_arguments_apart() -> None:
    cells = [(seed, choice, position) for seed in range(-20, 20) for choice in range(10) for position in range(25)]
    numbers = [uniform(*cell) for cell in cells]
    assert all(0 <= n < 1 for n in numbers)
    assert len(set(numbers)) > len(numbers) - 5  # 10,000 of 2**32 numbers: hardly two alike
    bins = torch.histc(torch.tensor(numbers), 20, 0, 1)
    assert ((bins - 500) ** 2 / 500).sum() < 45  # chi-square, 19 degrees of freedom: 1 in 1000 is above 43.8
    following = torch.corrcoef(torch.tensor([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(following) < 0.03


def test_usable_rows() -> None:
    rows = random_logits(5, 40)
    rows[1, 7] = math.nan
    rows[2, 0] = math.inf
    rows[3, 5] = -math.inf
    rows[4] = -math.inf
    assert usable(rows) == [True, False, False, True, False]
    assert usable(rows[:0]) == []


def test_logprobs_are_those_of_raw_logits() -> None:
    row = random_logits(1, 500)[0]
    value, top = logprobs(row, 123, 20)
    expected, expected_top = reference.scored(row.tolist(), 123, 20)
    assert value == pytest.approx(expected, abs=1e-5)
    assert [i for i, _ in top] == [i for i, _ in expected_top] == likeliest_first(row)[:20]
    assert [x for _, x in top] == pytest.approx([x for _, x in expected_top], abs=1e-5)
    assert logprobs(row, 123, 0) == (value, ())
    assert len(logprobs(row[:5], 2, 20)[1]) == 5
