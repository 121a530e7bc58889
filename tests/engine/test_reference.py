"""The engine equals the slow, obvious reference (invariant 12): tokens, logprobs, finish and usage."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine import reference
from engine.reference import reference_generate
from engine.types import Request, Usage
from tests.engine.lab import NEAR, a_model, a_prompt, agrees, generate, params, running
from tests.peer import peer_logits, peer_model
from tests.tiny import random_tensors

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "MHA, head_dim 48": {"n_kv_heads": 4, "head_dim": 48},
    "GQA 7, head_dim 8": {"n_heads": 7, "n_kv_heads": 1, "head_dim": 8, "rope_layout": "half", "qkv_bias": True},
    "GQA 3, tied": {"n_heads": 6, "n_kv_heads": 2, "tied": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": -7},
    "hot": {"temperature": 2.0, "seed": 2**63 - 1, "repetition_penalty": 1.5},
    "nearly greedy": {"temperature": 1e-5, "seed": 1},
    "penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "biased": {"logit_bias": {5: 100.0, 6: 99.5, 7: -100.0}, "frequency_penalty": 0.5},
    "minimum": {"min_tokens": 6, "stop_ids": frozenset(range(0, 320, 3))},
    "own ends": {"stop_ids": frozenset(range(0, 320, 9)), "ignore_eos": True, "temperature": 1.0, "seed": 4},
}
EOS = frozenset({1, 50, 100, 150, 200, 250, 300})


def test_the_references_logits_are_transformers() -> None:
    """So that the reference itself doesn't rest on our attention."""
    model = a_model(**SHAPES["plain"])
    tokens = a_prompt(50)
    theirs = peer_logits(peer_model(model.config, random_tensors(model.config)), tokens)
    assert (reference.logits(model, tokens) - theirs).abs().max() < NEAR


@pytest.mark.parametrize("shape", SHAPES)
def test_different_requests_at_once_equal_the_reference(shape: str) -> None:
    """Every way of sampling, each with its own prompt, joining a batch of fewer rows than requests."""
    model = a_model(**SHAPES[shape])
    requests = [
        Request(a_prompt(3 + 9 * i, seed=i), params(max_tokens=14, logprobs=0, **given), choice=i % 3)
        for i, given in enumerate(WAYS.values())
    ]
    with running(model, rows=4, chunk=20, shared_chunk=7, eos_ids=EOS) as engine:
        results = generate(engine, *requests)
    expected = [reference_generate(model, r, context_length=128, eos_ids=EOS) for r in requests]
    equal = sum(agrees(*pair) for pair in zip(results, expected, strict=True))
    assert equal >= 0.9 * sum(len(e.tokens) for e in expected)  # near ties are rare


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_scores_equal_the_references(chunk: int) -> None:
    model = a_model()
    request = Request(a_prompt(40), params(max_tokens=5, logprobs=4), prompt_logprobs=3)
    expected = reference_generate(model, request, context_length=128)
    with running(model, chunk=chunk) as engine:
        (result,) = generate(engine, request)
    assert agrees(result, expected) == 5
    pairs = list(zip(result.top_logprobs, expected.top_logprobs, strict=True))
    assert result.prompt_logprobs is not None and expected.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == 40 and result.prompt_logprobs[0] is None
    for ours, theirs in zip(result.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert ours is not None and theirs is not None
        assert ours[0] == pytest.approx(theirs[0], abs=NEAR)
        pairs.append((ours[1], theirs[1]))
    for ours_top, theirs_top in pairs:
        assert [x for _, x in ours_top] == pytest.approx([x for _, x in theirs_top], abs=NEAR)
        assert [i for i, _ in ours_top] == [i for i, _ in theirs_top]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_conversations_equal_the_reference(seed: int, reuse: bool) -> None:
    """Turns that build on earlier ones, some interleaved, some cancelled, with any cache history."""
    chance = random.Random(seed)
    model = a_model()
    talks = [a_prompt(chance.randint(1, 40), seed=i) for i in range(3)]
    compared = cached = 0
    with running(model, rows=2, chunk=16, shared_chunk=5, reuse=reuse) as engine:
        for _ in range(8):
            i = chance.randrange(3)
            doomed = engine.submit([Request([*talks[i][:20], chance.randrange(320)], params())])
            given = chance.choice([{}, {"temperature": 1.0, "seed": chance.randrange(9)}])
            request = Request(talks[i], params(max_tokens=chance.randint(1, 8), **given))
            (result,) = generate(engine, request)
            doomed.close()
            compared += agrees(result, reference_generate(model, request, context_length=128))
            cached += result.usage.cached
            talks[i] = [*talks[i], *result.tokens, chance.randrange(320)]
            if len(talks[i]) > 100:
                talks[i] = talks[i][:30]
    assert compared > 16 and (cached > 0) == reuse


def test_limits_and_ends_of_the_reference_itself() -> None:
    model = a_model()
    first = reference_generate(model, Request([4, 5], params()), context_length=8)
    assert (len(first.tokens), first.finish, first.usage) == (6, "length", Usage(2, 6, 0))
    end = first.tokens[2]
    ended = reference_generate(model, Request([4, 5], params()), context_length=8, eos_ids=frozenset({end}))
    assert ended.tokens == first.tokens[: first.tokens.index(end) + 1] and ended.finish == "stop"
    none = reference_generate(model, Request([4, 5], params(max_tokens=0), prompt_logprobs=0), context_length=2)
    assert (none.tokens, none.finish) == ([], "length")
    assert none.prompt_logprobs is not None and len(none.prompt_logprobs) == 2
