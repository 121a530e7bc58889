"""Invariant 6: the same request gives the same bits, alone or in company, at any chunking, after any cache history.

With the sizes that --deterministic measures. Contexts go beyond attention's first block of 512 keys.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from engine.reference import reference_generate
from engine.sequence import Mailbox
from engine.types import Request
from tests.engine.lab import Result, a_model, a_prompt, agrees, generate, params, read, running

SHAPES: dict[str, dict[str, Any]] = {
    "MHA, head_dim 48": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 48},
    "GQA 3, head_dim 64": {"n_heads": 3, "n_kv_heads": 1, "head_dim": 64},
    "GQA 7, head_dim 8": {"n_heads": 14, "n_kv_heads": 2, "head_dim": 8, "rope_layout": "half"},
    "odd widths": {"dim": 72, "n_heads": 6, "n_kv_heads": 3, "head_dim": 12, "hidden_dim": 100, "vocab_size": 331},
}
CONTEXT = 700
MIX: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_p": 0.8, "seed": 6},
    {"repetition_penalty": 1.3, "logit_bias": {3: 2.0}},
)


def requests() -> list[Request]:
    """Prompts with common beginnings; the lengths put borders of blocks, chunks and roundings inside the answers."""
    stem = a_prompt(640)
    prompts = [[*stem[:length], 7] for length in (2, 62, 126, 300, 505, 638)]
    prompts += [a_prompt(1, seed=1), [*stem[:100], *a_prompt(60, seed=2)]]
    return [
        Request(prompt, params(max_tokens=12, logprobs=2, **MIX[i % len(MIX)]), choice=i % 2)
        for i, prompt in enumerate(prompts)
    ] + [Request(stem[:70], params(max_tokens=3, logprobs=0), prompt_logprobs=1)]


@cache
def solo(shape: str) -> list[Result]:
    """Each alone, nothing reused, prompts in the scheduler's own chunks."""
    with running(a_model(**SHAPES[shape]), rows=1, context=CONTEXT, reuse=False, stable=True) as engine:
        return [generate(engine, request)[0] for request in requests()]


def settings(chance: random.Random) -> dict[str, Any]:
    return {
        "rows": chance.choice([2, 3, 5, 8]),
        "chunk": chance.choice([1 + chance.randrange(40), 97, 256, 640]),
        "shared_chunk": chance.choice([3, 8, 32, 200]),
        "reuse": chance.random() < 0.7,
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_request_gives_the_same_bits(shape: str) -> None:
    expected = solo(shape)
    reused = 0
    for seed in range(3):
        chance = random.Random(seed)
        with running(a_model(**SHAPES[shape]), context=CONTEXT, stable=True, **settings(chance)) as engine:
            asked = list(enumerate(requests()))
            chance.shuffle(asked)
            company: list[Mailbox] = []
            sent: list[tuple[int, Mailbox]] = []
            for index, request in asked:
                if chance.random() < 0.5:  # strangers, some of whom leave early, with beginnings of their own or ours
                    stranger = [*chance.choice(asked)[1].prompt[: chance.randint(0, 200)], chance.randrange(320)]
                    company.append(engine.submit([Request(stranger, params(max_tokens=chance.randint(0, 30)))]))
                    if chance.random() < 0.3:
                        company[-1].close()
                sent.append((index, engine.submit([request])))
            for index, mailbox in sent:
                (result,) = read(mailbox)
                assert result.text == expected[index].text, f"request {index}, schedule {seed}"
                reused += result.usage.cached
            for mailbox in company:
                read(mailbox)
    assert reused > 0


@pytest.mark.parametrize("shape", ["GQA 3, head_dim 64"])
def test_the_same_request_again_and_again(shape: str) -> None:
    """Every turn of a conversation on a warm cache equals the same prompt on a cold one."""
    model = a_model(**SHAPES[shape])
    with running(model, rows=2, context=CONTEXT, stable=True) as warm:
        prompt, turns = a_prompt(480), []
        for turn in range(5):
            request = Request(prompt, params(max_tokens=9, logprobs=1, temperature=1.0, seed=turn))
            (result,) = generate(warm, request)
            turns.append((request, result))
            prompt = [*prompt, *result.tokens, *a_prompt(11, seed=turn)]
        assert [r.usage.cached > 0 for _, r in turns] == [False] + [True] * 4
    for request, result in turns:
        with running(model, rows=1, context=CONTEXT, stable=True, chunk=50) as cold:
            assert generate(cold, request)[0].text == result.text


def test_choices_in_one_batch_equal_choices_alone() -> None:
    model = a_model(**SHAPES["odd widths"])
    choices = [Request(a_prompt(90), params(temperature=1.0, seed=1, max_tokens=10, logprobs=1), c) for c in range(6)]
    with running(model, rows=4, stable=True) as engine:
        together = [r.text for r in generate(engine, *choices)]
        assert together == [generate(engine, choice)[0].text for choice in choices]
    assert len({str(t) for t in together}) == 6


@pytest.mark.parametrize("shape", ["MHA, head_dim 48", "GQA 3, head_dim 64"])
def test_long_contexts_equal_the_reference(shape: str) -> None:
    model = a_model(**SHAPES[shape])
    pairs = [
        (result, reference_generate(model, request, context_length=CONTEXT))
        for request, result in zip(requests(), solo(shape), strict=True)
        if len(request.prompt) > 500
    ]
    assert sum(agrees(*pair) for pair in pairs) > 12
