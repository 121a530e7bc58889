"""Token events to text: whole characters, stop strings, one end per choice, logprobs that travel with their text."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import TokenEvent, Usage
from errors import EngineError
from models.dialects.decode import TokenLogprob, decode_stream
from models.dialects.stops import StopFinder

END = 256
quick = settings(max_examples=200, deadline=None)


class FakeSubmission:
    """An engine that has all its events ready. A cancelled request gets a terminal event, as the contract says."""

    def __init__(self, items):
        self.items = list(items)
        self.cancelled = []
        self.closed = 0
        self.read = 0

    def __iter__(self):
        for item in self.items:
            self.read += 1
            yield item

    def cancel(self, index):
        self.cancelled.append(index)

    def close(self):
        self.closed += 1


class Words:
    """A tokenizer whose tokens are given byte strings."""

    def __init__(self, words):
        self.words = list(words)

    def token_bytes(self, token_id):
        return self.words[token_id] if token_id < len(self.words) else b""

    def token_text(self, token_id):
        return self.token_bytes(token_id).decode("utf-8", "replace")


def token_events(count, finish="stop", end=END, prompt=3, index=0, first=0):
    """Tokens first, first + 1, ... and a terminal event, as the engine sends them."""
    events = [
        (
            index,
            TokenEvent(first + i, Usage(prompt, i + 1, 1), logprob=-float(i), top_logprobs=((first + i, -float(i)),)),
        )
        for i in range(count)
    ]
    last = Usage(prompt, count + (end is not None), 1)
    return [*events, (index, TokenEvent(end, last, logprob=-9.0, finish=finish))]


def run(words, *, finish="stop", end=END, **options):
    submission = FakeSubmission(token_events(len(words), finish, end))
    events = list(decode_stream(submission, Words(words), **options))
    assert submission.closed
    return [event for event in events if event is not None], submission


def joined(events):
    return "".join(event.text for event in events)


# Text


def test_a_character_over_several_tokens():
    events, _ = run([b"a", b"\xe6\xbc", b"\xa2", b"\xf0", b"\x9f\xa4", b"\x96!"])
    assert [event.text for event in events] == ["a", "漢", "🤖!", ""]


def test_a_character_cut_by_max_tokens_is_dropped():
    events, _ = run([b"a", b"\xe6\xbc"], finish="length", end=None)
    assert joined(events) == "a"
    assert events[-1].finish == "length"
    assert events[-1].usage == Usage(3, 2, 1)


def test_ascii_tokens_give_a_delta_each():
    words = [b"one", b" two", b" three", b" four"] * 5
    events, _ = run(words, stop=["\n\n", "END"])
    assert [event.text.encode() for event in events[:-1]] == words


def test_only_the_beginning_of_a_stop_is_held_back():
    events, _ = run([b"a<", b"b", b"<s", b"top", b"|"], stop=["<stop>"])
    assert [event.text for event in events] == ["a", "<b", "<stop|", ""]


def test_the_first_space_of_sentencepiece(sp_tokenizer):
    ids = sp_tokenizer.encode("Once  upon a naïve 漢字 dog. ")
    items = [(0, TokenEvent(token_id, Usage(1, i + 1, 0))) for i, token_id in enumerate(ids)]
    items.append((0, TokenEvent(None, Usage(1, len(ids), 0), finish="length")))
    kept = joined(filter(None, decode_stream(FakeSubmission(items), sp_tokenizer)))
    dropped = joined(filter(None, decode_stream(FakeSubmission(items), sp_tokenizer, strip_first_space=True)))
    assert kept == sp_tokenizer.decode(ids) == " Once  upon a naïve 漢字 dog. "
    assert dropped == kept[1:]


def test_end_tokens_and_control_tokens_are_no_text():
    events, _ = run([b"a", b"", b"b"], end=0, want_logprobs=True)
    assert joined(events) == "ab"
    assert [entry.token for event in events for entry in event.logprobs] == ["a", "b"]


# Stops


@pytest.mark.parametrize("stop", [[], [""], ["", "nowhere"], ["prompt"]])
def test_stops_that_do_not_occur(stop):
    events, submission = run([b"the ", b"text"], stop=stop)
    assert joined(events) == "the text"
    assert (events[-1].finish, submission.cancelled) == ("stop", [])


def test_a_stop_over_several_tokens_leaks_nothing():
    events, submission = run([b"text", b" S", b"TO", b"P rest", b"more"], stop=["STOP"])
    assert [event.text for event in events] == ["text", " ", ""]
    assert (events[-1].finish, events[-1].usage) == ("stop", Usage(3, 4, 1))
    assert submission.cancelled == [0]


@pytest.mark.parametrize(("finish", "end"), [("stop", END), ("length", None), ("cancelled", None), ("error", None)])
def test_half_a_stop_at_the_end_is_flushed(finish, end):
    events, submission = run([b"text ST", b"O"], stop=["STOP"], finish=finish, end=end)
    assert joined(events) == "text STO"
    assert (events[-1].text, events[-1].finish) == ("STO", finish)
    assert submission.cancelled == []


def test_many_stops():
    stops = [f"<{i}>" for i in range(20)]
    assert joined(run([b"a", b"<1", b"9", b">", b"b"], stop=stops)[0]) == "a"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abSTOP")])
def test_the_stop_may_be_included(include, text):
    events, _ = run([b"ab", b"ST", b"OP tail"], stop=["STOP"], include_stop=include)
    assert joined(events) == text


def test_the_stop_completed_first_wins_and_the_longest_of_those():
    assert joined(run([b"abcde"], stop=["abcde", "cd"])[0]) == "ab"
    assert joined(run([b"abcde"], stop=["cd", "bcd"])[0]) == "a"


def naive(text, stops, include):
    """(text up to the stop completed first, index behind it) by trying every end; the whole text if there is none."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return text[: end if include else min(starts)], end
    return text, None


@st.composite
def cut_texts(draw):
    """A text over a small alphabet, cut into tokens anywhere, inside characters too."""
    data = draw(st.text("ab<é漢🤖", max_size=30)).encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=12)))
    edges = [0, *(cut for cut in cuts if cut < len(data)), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


@quick
@given(words=cut_texts(), stops=st.lists(st.text("ab<é漢", max_size=4), max_size=4), include=st.booleans())
def test_any_text_any_cuts_any_stops(words, stops, include):
    events, submission = run(words, stop=stops, include_stop=include, want_logprobs=True)
    text, end = naive(b"".join(words).decode(), stops, include)
    assert joined(events) == text
    assert [event.finish for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish == "stop"
    if end is None:
        assert (events[-1].usage.completion, submission.cancelled) == (len(words) + 1, [])
    else:
        size, completing = len(b"".join(words).decode()[:end].encode()), 0
        while len(b"".join(words[:completing])) < size:
            completing += 1
        assert (events[-1].usage.completion, submission.cancelled) == (completing, [0])
    # an entry for every token that has a byte in the text, and for no other
    kept, starts = len(text.encode()), [len(b"".join(words[:i])) for i in range(len(words))]
    entries = [entry.token_id for event in events for entry in event.logprobs]
    assert entries == [i for i, start in enumerate(starts) if start < kept]


@quick
@given(words=cut_texts(), stops=st.lists(st.text("ab<é", min_size=1, max_size=4), max_size=3))
def test_entries_come_with_the_delta_that_holds_their_text(words, stops):
    events, _ = run(words, stop=stops, want_logprobs=True)
    starts = [len(b"".join(words[:i])) for i in range(len(words))]
    released = 0
    for event in events:
        before, released = released, released + len(event.text.encode())
        for entry in event.logprobs:
            assert before <= starts[entry.token_id] < released


def test_long_stops_and_texts_that_almost_match():
    finder = StopFinder(["a" * 50 + "b"])
    text = "".join(finder.push("a") for _ in range(5000))
    assert text == "a" * 4950
    assert finder.push("bc") == ""
    assert finder.matched


# Finish and usage


@pytest.mark.parametrize("finish", ["stop", "length", "cancelled"])
def test_the_engines_finish_is_passed_on(finish):
    events, _ = run([b"a"], finish=finish)
    assert [(event.finish, event.error) for event in events] == [(None, None), (finish, None)]


def test_immediate_end():
    events, _ = run([])
    assert [(event.text, event.finish, event.usage) for event in events] == [("", "stop", Usage(3, 1, 1))]


def test_a_stop_completed_by_the_last_token_allowed():
    events, _ = run([b"aX"], stop=["X"], finish="length", end=None)
    assert [(event.text, event.finish) for event in events] == [("a", "stop")]


def test_an_error_is_passed_on():
    failure = EngineError("boom")
    items = [*token_events(1)[:1], (0, TokenEvent(None, Usage(3, 1, 1), finish="error", error=failure))]
    events = list(decode_stream(FakeSubmission(items), Words([b"a"])))
    assert (events[-1].finish, events[-1].error) == ("error", failure)


@pytest.mark.parametrize("prompts", [(), [[1, 2, 3], [1, 2, 3]]])
def test_an_engine_that_dies_without_a_word(prompts):
    submission = FakeSubmission(token_events(2)[:2])
    events = list(decode_stream(submission, Words([b"a", b"S"]), stop=["STOP"], prompts=prompts))
    ends = {event.choice: event for event in events if event is not None and event.finish is not None}
    assert sorted(ends) == list(range(max(1, len(prompts))))
    for end in ends.values():
        assert end.finish == "error"
        assert isinstance(end.error, EngineError)
    assert (ends[0].text, ends[0].usage) == ("S", Usage(3, 2, 1))
    assert submission.closed


def test_choices_interleave_and_end_on_their_own():
    words = [b"zero", b"STOP", b"uno", b" due"]
    first, second = token_events(2, index=0), token_events(2, index=1, first=2)
    items = [first[0], second[0], None, first[1], first[2], second[1], second[2]]
    submission = FakeSubmission(items)
    events = list(decode_stream(submission, Words(words), stop=["STOP"]))
    told = [None if event is None else (event.choice, event.text, event.finish) for event in events]
    assert told == [(0, "zero", None), (1, "uno", None), None, (0, "", "stop"), (1, " due", None), (1, "", "stop")]
    assert submission.cancelled == [0]


def test_nothing_is_read_after_the_last_choice_ended():
    submission = FakeSubmission(token_events(5))
    events = list(decode_stream(submission, Words([b"a", b"X", *[b"c"] * 3]), stop=["X"], prompts=[[1]]))
    assert (joined(events), submission.read, submission.closed) == ("a", 2, 1)


def test_a_tick_for_every_quiet_moment():
    items = token_events(3)
    items.insert(1, None)
    events = list(decode_stream(FakeSubmission(items), Words([b"S", b"T", b"x"]), stop=["STOP"]))
    assert [None if event is None else event.text for event in events] == [None, None, None, "STx", ""]


@quick
@given(words=cut_texts(), stops=st.lists(st.text("ab<é", max_size=3), max_size=3), data=st.data())
def test_timing_changes_nothing(words, stops, data):
    plain, _ = run(words, stop=stops, want_logprobs=True)
    items = token_events(len(words))
    for _ in range(data.draw(st.integers(0, 5))):
        items.insert(data.draw(st.integers(0, len(items) - 1)), None)
    events = decode_stream(FakeSubmission(items), Words(words), stop=stops, want_logprobs=True)
    assert [event for event in events if event is not None] == plain


# Closing


@pytest.mark.parametrize("read", [0, 1])
def test_closing_stops_the_requests(read):
    submission = FakeSubmission(token_events(3))
    stream = decode_stream(submission, Words([b"a", b"b", b"c"]))
    for _ in range(read):
        next(stream)
    stream.close()
    stream.close()
    assert submission.closed
    assert list(stream) == []


def test_a_stream_let_go_stops_the_requests():
    submission = FakeSubmission(token_events(3))
    stream = decode_stream(submission, Words([b"a", b"b", b"c"]))
    next(stream)
    del stream
    gc.collect()
    assert submission.closed


def test_a_failure_stops_the_requests():
    class Broken(Words):
        def token_bytes(self, token_id):
            raise RuntimeError("broken")

    submission = FakeSubmission(token_events(1))
    with pytest.raises(RuntimeError, match="broken"):
        list(decode_stream(submission, Broken([b"a"])))
    assert submission.closed


# Logprobs


def test_logprobs_are_told_only_when_asked():
    assert all(event.logprobs == () for event in run([b"a"])[0])


def test_what_an_entry_says():
    top = ((0, -0.5), (1, -1.5))
    items = [(0, replace(token_events(1)[0][1], top_logprobs=top, logprob=-0.5)), token_events(1)[1]]
    events = list(decode_stream(FakeSubmission(items), Words([b"\xe6\xbc\xa2", b"b"]), want_logprobs=True))
    likeliest = (TokenLogprob("漢", "漢".encode(), 0, -0.5), TokenLogprob("b", b"b", 1, -1.5))
    assert events[0].logprobs == (TokenLogprob("漢", "漢".encode(), 0, -0.5, likeliest),)


def entries(words, **options):
    events, _ = run(words, want_logprobs=True, **options)
    return [(event.text, [entry.token_id for entry in event.logprobs]) for event in events]


def test_entries_of_held_text_travel_with_it():
    assert entries([b"a", b" S", b"T", b"x"], stop=["STOP"]) == [("a", [0]), (" ", [1]), ("STx", [2, 3]), ("", [])]
    assert entries([b"S", b"T"], stop=["STOP"]) == [("ST", [0, 1])]


def test_entries_of_the_stop_string_are_dropped_but_partly_kept_ones_stay():
    assert entries([b"a", b"bS", b"TOP"], stop=["STOP"]) == [("a", [0]), ("b", [1]), ("", [])]
    assert entries([b"a", b"S", b"TOPb"], stop=["STOP"], include_stop=True) == [("a", [0]), ("STOP", [1, 2])]


def test_entries_of_half_characters_travel_with_the_whole():
    assert entries([b"a", b"\xe6", b"\xbc", b"\xa2b"]) == [("a", [0]), ("漢b", [1, 2, 3]), ("", [])]
    assert entries([b"a", b"\xe6"], finish="length") == [("a", [0]), ("", [])]


def test_prompt_logprobs_come_with_the_first_event():
    given = [None, (-1.0, ((1, -1.0), (0, -2.0)))]
    items = [(0, TokenEvent(None, Usage(2, 0, 0), finish="length", prompt_logprobs=given))]
    events = list(decode_stream(FakeSubmission(items), Words([b"a", b"b"]), prompts=[[0, 1]]))
    top = (TokenLogprob("b", b"b", 1, -1.0), TokenLogprob("a", b"a", 0, -2.0))
    assert events[0].prompt_logprobs == (None, TokenLogprob("b", b"b", 1, -1.0, top))
    with pytest.raises(ValueError, match="needs `prompts`"):
        list(decode_stream(FakeSubmission(items), Words([b"a", b"b"])))


def test_prompt_logprobs_come_even_when_the_first_token_gives_no_text():
    items = token_events(1)
    items[0] = (0, replace(items[0][1], prompt_logprobs=[None]))
    events = list(decode_stream(FakeSubmission(items), Words([b"S"]), stop=["STOP"], prompts=[[0]]))
    assert [(event.text, event.prompt_logprobs) for event in events] == [("", (None,)), ("S", None)]
