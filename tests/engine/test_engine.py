"""The engine's promises: joins and leaves, limits, failures, one end for every stream. No sleeps: steps are held."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from engine.engine import Engine
from engine.sequence import Mailbox
from engine.types import Request
from errors import ContextLengthError, EngineError, QueueFullError, RequestError, UnavailableError
from models.cache import Segment
from tests.engine.lab import PATIENCE, a_model, a_prompt, generate, held, one, params, read, running

MODEL = a_model()


def submit(engine: Engine, prompt: Sequence[int], **given: Any) -> Mailbox:
    return engine.submit([Request(prompt, params(**given))])


def rows_of(segments: Sequence[Segment]) -> set[int]:
    return {segment.row for segment in segments}


def next_step(engine: Engine) -> list[Segment]:
    """Let the held step run, and wait for the one after it."""
    held(engine).permit()
    return held(engine).wait()


# --- joins, leaves, cancels


def test_requests_join_and_leave_between_steps() -> None:
    with running(MODEL, held=True) as engine:
        first = submit(engine, a_prompt(5), max_tokens=4)
        assert held(engine).wait() == [Segment(0, 0, 5)]
        second = submit(engine, a_prompt(3, seed=1), max_tokens=2)
        assert next_step(engine) == [Segment(0, 5, 1), Segment(1, 0, 3)]
        assert next_step(engine) == [Segment(0, 6, 1), Segment(1, 3, 1)]
        assert next_step(engine) == [Segment(0, 7, 1)]  # the second has its two tokens and left
        held(engine).permit()
        assert [len(read(m)[0].tokens) for m in (first, second)] == [4, 2]


def test_a_cancel_in_decode_frees_the_row_for_the_next_step() -> None:
    with running(MODEL, rows=1, held=True) as engine:
        mailbox = submit(engine, a_prompt(5))
        held(engine).wait()
        next_step(engine)
        waiting = submit(engine, a_prompt(4, seed=1), max_tokens=1)
        assert (engine.stats().running, engine.stats().waiting) == (1, 1)
        mailbox.cancel(0)
        assert next_step(engine) == [Segment(0, 0, 4)]  # the waiting one has the row
        held(engine).permit()
        (result,) = read(mailbox)
        assert result.finish == "cancelled" and 1 <= len(result.tokens) <= 2
        assert read(waiting)[0].finish == "length"


def test_a_cancel_in_prefill_ends_it_before_the_next_chunk() -> None:
    with running(MODEL, held=True, chunk=8) as engine:
        mailbox = submit(engine, a_prompt(100))
        assert held(engine).wait() == [Segment(0, 0, 8)]
        mailbox.close()
        other = submit(engine, a_prompt(3, seed=1), max_tokens=1)
        assert next_step(engine) == [Segment(1, 0, 3)]
        held(engine).permit()
        (result,) = read(mailbox)
        assert (result.finish, result.tokens, result.usage.prompt) == ("cancelled", [], 100)
        assert len(read(other)[0].tokens) == 1


def test_a_cancel_in_the_queue_never_runs() -> None:
    with running(MODEL, rows=1, held=True) as engine:
        first = submit(engine, a_prompt(5), max_tokens=2)
        held(engine).wait()
        second, third = submit(engine, a_prompt(6, seed=1)), submit(engine, a_prompt(7, seed=2), max_tokens=1)
        second.cancel(0)
        second.cancel(0)
        assert next_step(engine) == [Segment(0, 5, 1)]
        assert next_step(engine) == [Segment(0, 0, 7)]
        held(engine).permit()
        assert [read(m)[0].finish for m in (first, second, third)] == ["length", "cancelled", "length"]
        assert len(held(engine).steps) == 3


def test_one_choice_is_cancelled_and_the_others_go_on() -> None:
    with running(MODEL, held=True) as engine:
        mailbox = engine.submit([Request(a_prompt(4), params(max_tokens=3), choice) for choice in range(3)])
        held(engine).wait()
        mailbox.cancel(1)
        assert rows_of(next_step(engine)) == {0, 2}
        held(engine).let_go()
        assert [r.finish for r in read(mailbox, 3)] == ["length", "cancelled", "length"]
        mailbox.close()  # after the end: nothing


def test_who_reads_the_end_finds_the_row_free_and_itself_counted() -> None:
    """Not a moment later: with no queue at all, the next request is taken at once."""
    with running(MODEL, rows=1, max_queue=0) as engine:
        for done in range(1, 40):
            assert len(one(engine, a_prompt(3), max_tokens=1).tokens) == 1
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.requests["length"]) == (0, 0, done)


def test_a_reader_that_stops_reading_holds_nobody_up() -> None:
    with running(MODEL, rows=2) as engine:
        unread = submit(engine, a_prompt(5), max_tokens=100)
        for _ in range(5):
            assert len(one(engine, a_prompt(4), max_tokens=5).tokens) == 5
        assert len(read(unread)[0].tokens) == 100


# --- what is taken


def test_the_line_is_bounded() -> None:
    with running(MODEL, rows=2, max_queue=3, held=True) as engine:
        running_ones = [submit(engine, a_prompt(3, seed=i), max_tokens=1) for i in range(2)]
        waiting = engine.submit([Request(a_prompt(3), params(max_tokens=1))] * 2)
        with pytest.raises(QueueFullError) as caught:
            engine.submit([Request(a_prompt(3), params())] * 2)  # all or nothing: one would fit
        assert caught.value.status == 429 and caught.value.retry_after
        last = submit(engine, a_prompt(3), max_tokens=1)
        with pytest.raises(QueueFullError):
            submit(engine, a_prompt(3))
        with pytest.raises(RequestError) as never:
            engine.submit([Request(a_prompt(3), params())] * 6)
        assert never.value.status == 400 and never.value.param == "n"
        held(engine).let_go()
        for mailbox, count in ((running_ones[0], 1), (running_ones[1], 1), (waiting, 2), (last, 1)):
            assert all(r.finish == "length" for r in read(mailbox, count))
        assert len(generate(engine, *[Request(a_prompt(3), params(max_tokens=1))] * 5)) == 5  # exactly what fits


def test_a_cancelled_one_makes_room_in_the_line() -> None:
    with running(MODEL, rows=1, max_queue=1, held=True) as engine:
        first, second = submit(engine, a_prompt(3)), submit(engine, a_prompt(3))
        with pytest.raises(QueueFullError):
            submit(engine, a_prompt(3))
        held(engine).wait()
        second.close()
        next_step(engine)
        assert read(second)[0].finish == "cancelled"
        third = submit(engine, a_prompt(3), max_tokens=1)
        first.close()
        held(engine).let_go()
        assert [read(m)[0].finish for m in (first, third)] == ["cancelled", "length"]


@pytest.mark.parametrize(
    ("prompt", "given", "param"),
    [
        ([], {}, "prompt"),
        ([1, 320], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"logit_bias": {320: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([1], {"stop_ids": frozenset({320})}, "stop_ids"),
        ([1], {"stop_ids": frozenset({-1}), "min_tokens": 2}, "stop_ids"),
        ([1], {"stop_ids": frozenset(range(320)), "min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_cant_be_run_is_refused_and_harms_nobody(prompt: list[int], given: dict[str, Any], param: str) -> None:
    with running(MODEL) as engine:
        with pytest.raises(RequestError) as caught:
            engine.submit([Request([1, 2], params(max_tokens=1)), Request(prompt, params(**given))])
        assert caught.value.param == param and caught.value.status == 400
        assert engine.stats().waiting + engine.stats().running == 0
        assert len(one(engine, [1, 2], max_tokens=1).tokens) == 1


def test_prompts_at_the_limit() -> None:
    with running(MODEL, context=32) as engine:
        below = one(engine, a_prompt(31))
        assert (len(below.tokens), below.finish) == (1, "length")
        assert len(one(engine, a_prompt(30), max_tokens=100).tokens) == 2
        for length in (32, 33):
            with pytest.raises(ContextLengthError) as caught:
                one(engine, a_prompt(length))
            assert caught.value.code == "context_length_exceeded" and str(length) in caught.value.message
        scored = generate(engine, Request(a_prompt(32), params(max_tokens=0), prompt_logprobs=1))[0]
        assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 32
        with pytest.raises(ContextLengthError):
            one(engine, a_prompt(33), max_tokens=0)


# --- how it ends


def greedy_tokens(prompt: Sequence[int], count: int) -> list[int]:
    with running(MODEL) as engine:
        return one(engine, prompt, max_tokens=count).tokens


def test_length_and_stop() -> None:
    prompt = a_prompt(6)
    tokens = greedy_tokens(prompt, 12)
    position = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    end = tokens[position]
    whole = tokens[: position + 1]
    with running(MODEL, eos_ids=frozenset({end})) as engine:
        stopped = one(engine, prompt, max_tokens=50, logprobs=2)
        assert (stopped.tokens, stopped.finish) == (whole, "stop")  # the end token counts, and has a logprob
        assert stopped.logprobs[-1] is not None and len(stopped.top_logprobs[-1]) == 2
        assert one(engine, prompt, max_tokens=position + 1).finish == "stop"  # both at once: it did end
        cut = one(engine, prompt, max_tokens=position)
        assert (cut.tokens, cut.finish) == (whole[:-1], "length")
        assert one(engine, prompt, max_tokens=12, ignore_eos=True).tokens == tokens
        own = tokens[1]
        stopped = one(engine, prompt, max_tokens=12, ignore_eos=True, stop_ids=frozenset({own}))
        assert (stopped.tokens, stopped.finish) == (tokens[: tokens.index(own) + 1], "stop")
        longer = one(engine, prompt, max_tokens=position + 4, min_tokens=position + 3)
        assert end not in longer.tokens[: position + 3] and longer.tokens[:position] == tokens[:position]


def test_an_immediate_end() -> None:
    prompt = a_prompt(6)
    (end,) = greedy_tokens(prompt, 1)
    with running(MODEL, eos_ids=frozenset({end})) as engine:
        result = one(engine, prompt)
        assert (result.tokens, result.finish, result.usage.completion) == ([end], "stop", 1)


def test_no_tokens_at_all() -> None:
    with running(MODEL) as engine:
        result = one(engine, a_prompt(6), max_tokens=0)
        assert (result.tokens, result.finish, result.usage.completion) == ([], "length", 0)
        (scored,) = generate(engine, Request(a_prompt(6), params(max_tokens=0), prompt_logprobs=3))
        assert scored.tokens == [] and scored.prompt_logprobs is not None
        assert scored.prompt_logprobs[0] is None
        assert [len(entry[1]) for entry in scored.prompt_logprobs[1:] if entry is not None] == [3] * 5


def test_usage_and_stats_add_up() -> None:
    prompt = a_prompt(40)
    with running(MODEL) as engine:
        first = one(engine, prompt, max_tokens=3)
        again = one(engine, prompt, max_tokens=3)
        assert (first.usage.cached, again.usage.cached) == (0, 39)
        assert again.tokens == first.tokens
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.cached_tokens, stats.generation_tokens) == (80, 39, 6)
        assert stats.requests == {"length": 2} and stats.rows == 4 and stats.alive


# --- seeds


def test_seeds() -> None:
    prompt, given = a_prompt(8), {"temperature": 1.5, "max_tokens": 12}
    with running(MODEL) as engine:
        by_seed = {seed: one(engine, prompt, seed=seed, **given).tokens for seed in (0, -5, 1, 2**63 - 1, -(2**63))}
        assert len({tuple(t) for t in by_seed.values()}) == len(by_seed)
        assert all(one(engine, prompt, seed=seed, **given).tokens == tokens for seed, tokens in by_seed.items())
        for random_seed in (None, -1):
            assert len({tuple(one(engine, prompt, seed=random_seed, **given).tokens) for _ in range(4)}) == 4
        choices = [Request(prompt, params(seed=0, **given), choice) for choice in range(4)]
        results = [r.tokens for r in generate(engine, *choices)]
        assert len({tuple(t) for t in results}) == 4 and results[0] == by_seed[0]
        assert [r.tokens for r in generate(engine, *choices)] == results
        # the same prompt several times over, as /v1/completions sends it: also different without a seed
        same = [Request(prompt, params(**given))] * 3
        assert len({tuple(r.tokens) for r in generate(engine, *same)}) == 3


# --- failures


def failing(*steps: int, error: BaseException) -> Any:
    """A fault that raises in the given steps, counted from 0."""
    count = itertools.count()

    def fault(segments: Sequence[Segment], logits: Tensor) -> Tensor:
        if next(count) in steps:
            raise error
        return logits

    return fault


def test_a_failed_step_ends_its_requests_and_the_next_is_right() -> None:
    prompt = a_prompt(30)
    with running(MODEL) as engine:
        expected = one(engine, prompt, max_tokens=6).tokens
        held(engine).fault = failing(2, error=RuntimeError("no kernel"))
        results = generate(engine, *[Request(a_prompt(5, seed=i), params(max_tokens=9)) for i in range(3)])
        assert [r.finish for r in results] == ["error"] * 3
        assert all(isinstance(r.error, EngineError) and "no kernel" in r.error.message for r in results)
        assert [len(r.tokens) for r in results] == [2] * 3
        assert engine.alive
        again = one(engine, prompt, max_tokens=6)
        assert again.tokens == expected and engine.stats().running == 0


def test_a_failed_copy_is_a_failed_step() -> None:
    prompt = a_prompt(40)
    with running(MODEL, rows=2) as engine:
        expected = one(engine, prompt, max_tokens=4).tokens

        def copy(source: int, target: int, length: int) -> None:
            raise RuntimeError("no copy")

        held(engine).copy = copy  # type: ignore[method-assign]
        assert one(engine, [*prompt[:15], 3], max_tokens=4).finish == "error"
        del held(engine).copy
        assert one(engine, [*prompt[:15], 3], max_tokens=1).usage.cached == 15
        assert one(engine, prompt, max_tokens=4).tokens == expected


def test_only_the_failed_steps_requests_end() -> None:
    """A prompt that waited for its share of the budget was not touched, and goes on."""
    with running(MODEL, held=True, chunk=8) as engine:
        first, second = submit(engine, a_prompt(8)), submit(engine, a_prompt(9, seed=1), max_tokens=2)
        held(engine).fault = failing(0, error=RuntimeError("no kernel"))
        assert held(engine).wait() == [Segment(0, 0, 8)]
        held(engine).let_go()
        assert read(first)[0].finish == "error"
        assert (read(second)[0].finish, engine.stats().requests) == ("length", {"error": 1, "length": 1})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("given", [{}, {"temperature": 1.0, "seed": 1}, {"max_tokens": 0}, {"logit_bias": {3: 1.0}}])
def test_logits_that_are_no_numbers_end_their_request_alone(bad: float, given: dict[str, Any]) -> None:
    with running(MODEL, held=True) as engine:
        good = submit(engine, a_prompt(4), max_tokens=6)
        assert held(engine).wait() == [Segment(0, 0, 4)]
        broken = submit(engine, a_prompt(5, seed=1), **given)

        def fault(segments: Sequence[Segment], logits: Tensor) -> Tensor:
            logits = logits.clone()
            for i, segment in enumerate(segments):
                if segment.row == 1:
                    logits[i, 17] = bad
            return logits

        held(engine).fault = fault
        held(engine).let_go()
        result = read(broken)[0]
        assert result.finish == "error" and result.tokens == [] and isinstance(result.error, EngineError)
        assert "finite" in result.error.message
        assert not engine.runner.cache.k[:, 1].any()  # what may be NaN there can't reach the row's next user
        expected = read(good)[0]
        held(engine).fault = lambda segments, logits: logits
        assert expected.tokens == one(engine, a_prompt(4), max_tokens=6).tokens and expected.finish == "length"


class Crash(BaseException):
    pass


def test_a_dead_engine_ends_every_stream_and_takes_no_more() -> None:
    with running(MODEL, rows=1, held=True) as engine:
        mailboxes = [submit(engine, a_prompt(3, seed=i)) for i in range(3)]
        held(engine).wait()
        held(engine).fault = failing(0, error=Crash("gone"))
        held(engine).permit()
        for mailbox in mailboxes:
            (result,) = read(mailbox)
            assert result.finish == "error" and isinstance(result.error, EngineError) and "gone" in result.error.message
        assert not engine.alive and not engine.stats().alive
        with pytest.raises(UnavailableError):
            submit(engine, a_prompt(3))
        assert engine.stats().running == engine.stats().waiting == 0
        engine.stop()


def test_stopping_ends_every_stream() -> None:
    with running(MODEL, rows=1, held=True) as engine:
        mailboxes = [submit(engine, a_prompt(3, seed=i)) for i in range(3)]
        held(engine).wait()
        stopper = threading.Thread(target=engine.stop)
        stopper.start()
        held(engine).let_go()
        stopper.join(PATIENCE)
        assert not stopper.is_alive() and not engine.alive
        assert [read(m)[0].finish for m in mailboxes] == ["cancelled"] * 3
        with pytest.raises(UnavailableError):
            submit(engine, a_prompt(3))
        engine.stop()  # twice is once


# --- all of it at once


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_of_requests_cancels_and_failures(seed: int) -> None:
    """Every stream ends once, undisturbed ones with their solo text, and nothing is left behind."""
    chance = random.Random(seed)
    stems = [a_prompt(60, seed=i) for i in range(3)]

    def a_request() -> Request:
        prompt = [*chance.choice(stems)[: chance.randint(1, 60)], chance.randrange(320)]
        given = chance.choice([{}, {"temperature": 1.0, "seed": chance.randrange(5)}, {"repetition_penalty": 1.3}])
        scored = chance.choice([None, None, None, 1])
        return Request(prompt, params(max_tokens=chance.randint(0, 8), logprobs=1, **given), 0, scored)

    counter, broken = itertools.count(), {chance.randrange(100) for _ in range(3)}

    def fault(segments: Sequence[Segment], logits: Tensor) -> Tensor:
        if next(counter) in broken:
            raise RuntimeError("by chance")
        return logits

    results, refused = [], 0
    with running(MODEL, rows=3, max_queue=5, chunk=16, shared_chunk=5, stable=True) as engine:
        held(engine).fault = fault
        open_ones: list[tuple[Mailbox, list[Request]]] = []
        while len(results) < 30:
            requests = [a_request() for _ in range(chance.choice([1, 1, 1, 3]))]
            try:
                open_ones.append((engine.submit(requests), requests))
            except QueueFullError:
                refused += 1
                mailbox, asked = open_ones.pop(chance.randrange(len(open_ones)))
                results += zip(asked, read(mailbox, len(asked)), strict=True)
            if open_ones and chance.random() < 0.25:
                mailbox, asked = chance.choice(open_ones)
                mailbox.cancel(chance.randrange(len(asked)))
        for mailbox, asked in open_ones:
            results += zip(asked, read(mailbox, len(asked)), strict=True)
        stats = engine.stats()
        assert (stats.running, stats.waiting, sum(stats.requests.values())) == (0, 0, len(results))
        assert stats.generation_tokens >= sum(len(r.tokens) for _, r in results) and engine.alive
        held(engine).fault = lambda segments, logits: logits
        assert engine.stats().requests.get("length", 0) > 8 and refused
    with running(MODEL, rows=1, reuse=False, stable=True) as calm:
        for request, result in results:
            (expected,) = generate(calm, request)
            if result.finish == "length":
                assert result.text == expected.text
            else:
                assert result.finish in ("cancelled", "error")
                assert result.tokens == expected.tokens[: len(result.tokens)]
                assert result.logprobs == expected.logprobs[: len(result.tokens)]


def test_submitting_and_cancelling_from_many_threads() -> None:
    ends: list[str | None] = []

    def client(number: int) -> None:
        chance = random.Random(number)
        for i in range(12):
            mailbox = submit(engine, a_prompt(chance.randint(1, 30), seed=i), max_tokens=chance.randint(1, 6))
            if chance.random() < 0.4:
                mailbox.close()
            ends.append(read(mailbox)[0].finish)

    with running(MODEL, rows=2) as engine:
        threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert len(ends) == 96 and set(ends) <= {"length", "cancelled"}
        stats = engine.stats()
        assert (stats.running, stats.waiting, sum(stats.requests.values())) == (0, 0, 96)
