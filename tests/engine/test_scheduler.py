"""Who gets which row, what is computed and what is copied. No model, no thread."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler import Copy, Scheduler, Step, common_prefix
from engine.sequence import Mailbox, Sequence
from engine.types import Request
from tests.engine.lab import a_prompt, params


def queue(scheduler: Scheduler, prompt: list[int], *, prompt_logprobs: int | None = None, limit: int = 8) -> Sequence:
    sequence = Sequence(Request(prompt, params(), 0, prompt_logprobs), 0, limit, frozenset(), Mailbox(1), 0)
    scheduler.waiting.append(sequence)
    return sequence


def step(scheduler: Scheduler, token: int = 7) -> Step:
    """One step as the engine does it, every sequence being given `token` when it is ready for one."""
    step = scheduler.next_step()
    for work in step.work:
        assert work.tokens == work.sequence.tokens[work.segment.start : work.segment.end]
        scheduler.computed(work)
        if not work.sequence.prefilling:
            work.sequence.add(token, None, ())
    return step


def finish(scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.finish("stop")
    scheduler.release(sequence)


def shares(step: Step) -> list[tuple[int, int, int, int]]:
    return [(w.segment.row, w.segment.start, w.segment.count, w.wanted) for w in step.work]


def serve(scheduler: Scheduler, prompt: list[int]) -> int:
    """Run a prompt to the end; the row it had."""
    sequence = queue(scheduler, prompt)
    step(scheduler)
    while sequence.prefilling:
        step(scheduler)
    row = sequence.row
    assert row is not None
    finish(scheduler, sequence)
    return row


def test_rows_go_first_come_first_served() -> None:
    scheduler = Scheduler(2)
    waiting = [queue(scheduler, a_prompt(5, seed=i)) for i in range(5)]
    step(scheduler)
    assert [s.row for s in waiting] == [0, 1, None, None, None]
    finish(scheduler, waiting[1])
    step(scheduler)
    assert [s.row for s in waiting] == [0, None, 1, None, None]
    finish(scheduler, waiting[0])
    finish(scheduler, waiting[2])
    step(scheduler)
    assert {waiting[3].row, waiting[4].row} == {0, 1} and not scheduler.waiting


def test_prompts_come_in_chunks_and_share_a_step_oldest_first() -> None:
    scheduler = Scheduler(3, chunk=10, shared_chunk=4)
    queue(scheduler, a_prompt(13, seed=1))
    queue(scheduler, a_prompt(9, seed=2))
    assert shares(step(scheduler)) == [(0, 0, 10, 0)]
    assert shares(step(scheduler)) == [(0, 10, 3, 1), (1, 0, 7, 0)]
    # the first decodes now: the second gets the smaller share
    assert shares(step(scheduler)) == [(0, 13, 1, 1), (1, 7, 2, 1)]
    third = queue(scheduler, a_prompt(9, seed=3))
    assert [shares(step(scheduler))[2:] for _ in range(3)] == [[(2, 0, 4, 0)], [(2, 4, 4, 0)], [(2, 8, 1, 1)]]
    assert not third.prefilling


def test_decoding_never_waits_for_a_prompt() -> None:
    scheduler = Scheduler(2, chunk=64, shared_chunk=5)
    first = queue(scheduler, a_prompt(3), limit=100)
    step(scheduler)
    second = queue(scheduler, a_prompt(50, seed=1))
    for expected in range(2, 12):
        work = step(scheduler).work
        assert first.completion == expected and sum(w.segment.count for w in work) <= 1 + 5
    assert not second.prefilling


def test_a_scored_prompt_wants_all_its_logits_and_reuses_nothing() -> None:
    scheduler = Scheduler(2, chunk=4)
    prompt = a_prompt(6)
    serve(scheduler, prompt)
    scored = queue(scheduler, prompt, prompt_logprobs=0)
    assert [shares(step(scheduler))[0][1:] for _ in range(3)] == [(0, 4, 4), (4, 2, 2), (6, 1, 1)]
    assert scored.cached == 0


@pytest.mark.parametrize("reuse", [True, False])
def test_the_next_turn_takes_its_row_over_and_computes_only_what_is_new(reuse: bool) -> None:
    scheduler = Scheduler(3, reuse=reuse)
    prompt = a_prompt(20)
    row = serve(scheduler, prompt)
    turn = queue(scheduler, [*prompt, 7, 1, 2, 3])
    found = step(scheduler)
    assert found.copies == []
    if reuse:
        assert shares(found) == [(row, 20, 4, 1)] and turn.cached == 20
    else:
        assert shares(found) == [(1, 0, 24, 1)] and turn.cached == 0


def test_the_last_prompt_token_is_always_computed() -> None:
    scheduler = Scheduler(1)
    prompt = a_prompt(20)
    serve(scheduler, prompt)
    again = queue(scheduler, prompt)
    assert shares(step(scheduler)) == [(0, 19, 1, 1)] and again.cached == 19
    finish(scheduler, again)
    shorter = queue(scheduler, prompt[:5])
    assert shares(step(scheduler)) == [(0, 4, 1, 1)] and shorter.cached == 4


def test_a_short_beginning_is_copied_and_the_conversation_kept() -> None:
    scheduler = Scheduler(2)
    prompt = a_prompt(40)
    row = serve(scheduler, prompt)
    other = queue(scheduler, [*prompt[:10], 1, 2])
    found = step(scheduler)
    assert found.copies == [Copy(row, 1 - row, 10)] and other.row == 1 - row and other.cached == 10
    assert scheduler.rows[row].tokens == prompt  # the last sampled token was never computed
    finish(scheduler, other)
    turn = queue(scheduler, [*prompt, 7, 8])
    assert step(scheduler).copies == [] and turn.cached == 40


def test_the_only_free_row_is_taken_even_if_little_of_it_is_of_use() -> None:
    scheduler = Scheduler(1)
    prompt = a_prompt(40)
    serve(scheduler, prompt)
    other = queue(scheduler, [*prompt[:10], 1, 2])
    assert step(scheduler).copies == [] and other.cached == 10
    assert scheduler.rows[0].tokens == [*prompt[:10], 1, 2]


def test_a_running_row_lends_what_it_has() -> None:
    scheduler = Scheduler(2)
    prompt = a_prompt(40)
    first = queue(scheduler, prompt)
    step(scheduler, token=9)
    step(scheduler, token=9)
    second = queue(scheduler, [*prompt, 9, 5])
    found = step(scheduler)
    assert found.copies == [Copy(0, 1, 41)] and second.cached == 41
    assert first.row == 0 and scheduler.rows[0].tokens[:41] == [*prompt, 9]


def test_of_equal_beginnings_the_row_is_taken_that_loses_least() -> None:
    scheduler = Scheduler(3)
    shared = a_prompt(10)
    long = serve(scheduler, [*shared, *a_prompt(30, seed=1)])
    queue(scheduler, a_prompt(5, seed=9))  # keeps a row busy while the next is served
    step(scheduler)
    short = serve(scheduler, [*shared, 1])
    assert short != long
    turn = queue(scheduler, [*shared, 2, 3])
    assert step(scheduler).copies == [] and turn.row == short


def test_the_row_that_lay_idle_longest_goes_first() -> None:
    scheduler = Scheduler(3)
    sequences = [queue(scheduler, a_prompt(4, seed=i)) for i in range(3)]
    step(scheduler)
    for i in (1, 2, 0):
        finish(scheduler, sequences[i])
    for expected, seed in ((1, 11), (2, 12), (0, 13), (1, 14)):
        sequence = queue(scheduler, [319, *a_prompt(4, seed=seed)])
        scheduler.reuse = False
        step(scheduler)
        assert sequence.row == expected
        finish(scheduler, sequence)


def test_choices_of_one_prompt_share_its_prefill() -> None:
    scheduler = Scheduler(4, chunk=50, shared_chunk=10)
    prompt = a_prompt(120)
    choices = [queue(scheduler, prompt) for _ in range(4)]
    other = queue(scheduler, a_prompt(5, seed=5))
    assert shares(step(scheduler)) == [(0, 0, 50, 0)]
    assert [s.row for s in choices] == [0, None, None, None] and other.row == 1  # who gains nothing doesn't wait
    step(scheduler)
    while choices[0].prefilling:
        step(scheduler)
    found = step(scheduler)
    assert [(c.target, c.length) for c in found.copies] == [(2, 119), (3, 119)]
    assert [s.cached for s in choices[:3]] == [0, 119, 119] and list(scheduler.waiting) == [choices[3]]
    finish(scheduler, other)
    step(scheduler)
    assert choices[3].cached == 119


def test_who_waits_for_a_prompt_goes_on_when_it_is_cancelled() -> None:
    scheduler = Scheduler(2, chunk=50)
    prompt = a_prompt(120)
    first, second = queue(scheduler, prompt), queue(scheduler, prompt)
    step(scheduler)
    first.mailbox.cancel(0)
    assert scheduler.drop_cancelled() == [first]
    scheduler.release(first)
    step(scheduler)
    assert second.cached == 50 and second.row == 0  # the cancelled one's work isn't lost


def test_cancelled_ones_leave_the_line_and_keep_its_order() -> None:
    scheduler = Scheduler(1)
    running = queue(scheduler, a_prompt(3))
    step(scheduler)
    waiting = [queue(scheduler, a_prompt(3, seed=i)) for i in range(4)]
    for sequence in (waiting[1], waiting[2], running):
        sequence.mailbox.cancel(0)
    assert set(scheduler.drop_cancelled()) == {waiting[1], waiting[2], running}
    assert list(scheduler.waiting) == [waiting[0], waiting[3]]


def test_a_cancel_that_comes_while_the_line_is_searched_loses_nobody() -> None:
    """Other threads cancel at any time: each sequence is asked once, or stays for the next round."""
    scheduler = Scheduler(1)

    class Late(Sequence):
        asked = 0

        @property
        def cancelled(self) -> bool:
            self.asked += 1
            return self.asked > 1

    early = queue(scheduler, a_prompt(3))
    early.mailbox.cancel(0)
    late = Late(Request(a_prompt(3), params()), 0, 8, frozenset(), Mailbox(1), 0)
    scheduler.waiting.append(late)
    assert scheduler.drop_cancelled() == [early]
    assert list(scheduler.waiting) == [late]
    assert scheduler.drop_cancelled() == [late]


def test_what_cant_be_trusted_is_forgotten() -> None:
    scheduler = Scheduler(1)
    prompt = a_prompt(20)
    sequence = queue(scheduler, prompt)
    step(scheduler)
    scheduler.release(sequence, keep=False)
    again = queue(scheduler, prompt)
    step(scheduler)
    assert again.cached == 0


def test_copies_read_a_row_before_it_is_written() -> None:
    """Rows hold what the scheduler thinks they hold, through any history, when copies are done in order."""
    chance = random.Random(0)
    scheduler = Scheduler(4, chunk=16, shared_chunk=6)
    contents: list[list[Any]] = [[] for _ in range(4)]  # what a cache would hold, by position
    stems = [a_prompt(60, seed=i) for i in range(3)]
    for _ in range(600):
        if len(scheduler.waiting) < 3:
            stem = chance.choice(stems)
            queue(scheduler, [*stem[: chance.randint(1, 60)], *a_prompt(chance.randint(0, 9), chance.randrange(99)), 1])
        found = scheduler.next_step()
        for copy in found.copies:
            contents[copy.target][: copy.length] = contents[copy.source][: copy.length]
        for work in found.work:
            held, segment = contents[work.segment.row], work.segment
            held[segment.start : segment.end] = work.tokens
            assert held[: segment.end] == work.sequence.tokens[: segment.end]
            scheduler.computed(work)
            if not work.sequence.prefilling:
                work.sequence.add(chance.randrange(320), None, ())
        for row in scheduler.rows:
            assert contents[row.index][: len(row.tokens)] == row.tokens
        for sequence in scheduler.running:
            if sequence.finished is not None or chance.random() < 0.1:
                finish(scheduler, sequence)


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, b) == expected
