"""How output reads: token events in, text events out.

Everything that shows text (the wire, the command line) goes through `decode_stream`. A family's output parser
(reasoning, tool calls) is a function from an iterator of text events to one of richer events, put around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from errors import EngineError
from models.dialects.stops import StopFinder
from models.tokenizers.incremental import IncrementalDecoder

if TYPE_CHECKING:
    from models.tokenizers import Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]
TopLogprobs = Sequence[tuple[int, float]]


class Usage(Protocol):
    """Tokens so far: engine.types.Usage by its shape."""

    @property
    def prompt(self) -> int: ...
    @property
    def completion(self) -> int: ...
    @property
    def cached(self) -> int: ...


class TokenEvent(Protocol):
    """engine.types.TokenEvent by its shape."""

    @property
    def token_id(self) -> int | None: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top_logprobs(self) -> TopLogprobs: ...
    @property
    def finish(self) -> FinishReason | None: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def prompt_logprobs(self) -> Sequence[tuple[float, TopLogprobs] | None] | None: ...


class Submission(Protocol):
    """engine.types.Submission by its shape."""

    def __iter__(self) -> Iterator[tuple[int, TokenEvent] | None]: ...
    def cancel(self, index: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class NoUsage:
    """The usage of a choice that never had an event."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token as logprobs report it; `top` are the likeliest tokens at its place, likeliest first."""

    token: str
    bytes: bytes
    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of one choice's text. Exactly one event of a choice, its last, has `finish`.

    `usage` is that of the token that released the text, or completed a stop string. `logprobs` are the tokens whose
    text is released here. `prompt_logprobs`, on a choice's first event if asked for: one per prompt token, None for
    the first.
    """

    choice: int
    text: str
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: Exception | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class TextStream(Iterator[TextEvent | None]):
    """What decode_stream gives. `close` stops the requests, also when nothing was read yet."""

    def __init__(self, events: Generator[TextEvent | None], submission: Submission) -> None:
        self._events = events
        self._submission = submission

    def __next__(self) -> TextEvent | None:
        return next(self._events)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self._events.close()
        self._submission.close()


def decode_stream(
    submission: Submission,
    tokenizer: Tokenizer,
    *,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    strip_first_space: bool = False,
    want_logprobs: bool = False,
    prompts: Sequence[Sequence[int]] = (),
) -> TextStream:
    """The texts of a submission's choices, as their tokens arrive; None when there is nothing to tell for now.

    `stop`: strings that end a choice: its text stops before the first of them (after it with `include_stop`), its
    finish is "stop" and its request is cancelled. `strip_first_space`: drop the space a sentencepiece answer begins
    with. `prompts`: the token ids submitted, by choice; needed for prompt_logprobs, and lets the stream end as soon as
    every choice has. A choice left without an end (the engine died) finishes with an EngineError. The submission is
    closed when the stream ends, fails or is closed.
    """

    def new(index: int) -> _Choice:
        prompt = prompts[index] if prompts else None
        decoder = IncrementalDecoder(tokenizer, strip_first_space)
        return _Choice(index, tokenizer, decoder, StopFinder(stop, include_stop), want_logprobs, prompt)

    def events() -> Generator[TextEvent | None]:
        choices = {index: new(index) for index in range(len(prompts))}
        try:
            for item in submission:
                if item is None:
                    yield None
                    continue
                index, event = item
                if index not in choices:
                    choices[index] = new(index)
                choice = choices[index]
                if choice.finished:  # by a stop string: what the engine still sends is no part of the text
                    continue
                read = choice.read(event)
                if choice.finished and event.finish is None:
                    submission.cancel(index)
                yield read if _says_something(read) else None
                if prompts and all(choice.finished for choice in choices.values()):
                    return
            yield from (choice.abandon() for choice in choices.values() if not choice.finished)
        finally:
            submission.close()

    return TextStream(events(), submission)


def _says_something(event: TextEvent) -> bool:
    return bool(event.text or event.logprobs) or event.finish is not None or event.prompt_logprobs is not None


class _Choice:
    """One choice's text so far."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        decoder: IncrementalDecoder,
        finder: StopFinder,
        want_logprobs: bool,
        prompt: Sequence[int] | None,
    ) -> None:
        self.finished = False
        self._index = index
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._finder = finder
        self._want_logprobs = want_logprobs
        self._prompt = prompt
        self._usage: Usage = NoUsage()
        self._decoded = 0  # characters the decoder gave
        self._released = 0  # characters passed on
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # by the character their text begins at

    def read(self, event: TokenEvent) -> TextEvent:
        """The text event of a token event; it may be empty."""
        self._usage = event.usage
        if event.finish is None:
            text = self._finder.push(self._decode(event))
        else:
            text = self._finder.push(self._decoder.flush())
            text += self._finder.flush()
        finish: FinishReason | None = "stop" if self._finder.matched else event.finish
        error = event.error
        if finish == "error" and error is None:
            error = EngineError("The engine failed.")
        return self._tell(text, finish, error if finish == "error" else None, self._read_prompt(event))

    def abandon(self) -> TextEvent:
        """The end of a choice whose events ceased without one."""
        return self._tell(
            self._finder.flush(), "error", EngineError("The engine stopped before the text was complete.")
        )

    def _tell(
        self,
        text: str,
        finish: FinishReason | None,
        error: Exception | None,
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None,
    ) -> TextEvent:
        self.finished = finish is not None
        self._released += len(text)
        entries = []
        while self._waiting and self._waiting[0][0] < self._released:
            entries.append(self._waiting.popleft()[1])
        return TextEvent(self._index, text, self._usage, tuple(entries), finish, error, prompt_logprobs)

    def _decode(self, event: TokenEvent) -> str:
        if event.token_id is None:
            return ""
        # a token that adds no bytes (an end token under ignore_eos) has no text that could be in the content
        if self._want_logprobs and event.logprob is not None and self._tokenizer.token_bytes(event.token_id):
            entry = self._entry(event.token_id, event.logprob, event.top_logprobs)
            self._waiting.append((self._decoded, entry))
        text = self._decoder.push(event.token_id)
        self._decoded += len(text)
        return text

    def _entry(self, token_id: int, logprob: float, top: TopLogprobs = ()) -> TokenLogprob:
        likeliest = tuple(self._entry(other, value) for other, value in top)
        text, data = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
        return TokenLogprob(text, data, token_id, logprob, likeliest)

    def _read_prompt(self, event: TokenEvent) -> tuple[TokenLogprob | None, ...] | None:
        given = event.prompt_logprobs
        if given is None:
            return None
        if self._prompt is None:
            raise ValueError("decode_stream needs `prompts` to name the tokens of prompt_logprobs")
        pairs = zip(self._prompt, given, strict=True)
        return tuple(None if entry is None else self._entry(token_id, *entry) for token_id, entry in pairs)
