"""Watching an answer come: when its tokens arrived, how many they are, and whether anyone still listens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from api.answer import Tally
from errors import TorchchatError
from models.dialects.decode import TextEvent


class ClientLeftError(TorchchatError):
    """The client closed the connection before its answer was complete. Nobody sees this but the log."""

    status = 499  # nginx's number for it
    type = "client_closed_request"


class Timing:
    """The clock of one answer. `gap` is told the seconds between tokens of a choice; times are from `started`, the
    moment by time.perf_counter() when the request came."""

    def __init__(self, per_prompt: int, gap: Callable[[float], None], started: float) -> None:
        self._gap = gap
        self._tally = Tally(per_prompt)
        self._latest: dict[int, tuple[int, float]] = {}  # by choice: its tokens, when the last came
        self._started = started
        self.first: float | None = None  # seconds until the first token
        self.last: float | None = None

    def watch(self, events: Iterable[TextEvent | None], left: Callable[[], bool]) -> Iterator[TextEvent | None]:
        """The same events. Raises ClientLeftError as soon as `left` says so."""
        for event in events:
            if left():
                raise ClientLeftError("The client left.")
            if event is not None:
                self._add(event)
            yield event

    def _add(self, event: TextEvent) -> None:
        self._tally.add(event)
        before, then = self._latest.get(event.choice, (0, 0.0))
        new = event.usage.completion - before
        if new <= 0:
            return
        now = time.perf_counter() - self._started
        self._latest[event.choice] = (event.usage.completion, now)
        self.last = now
        if self.first is None:
            self.first = now
        if before:
            self._gap((now - then) / new)

    def describe(self) -> str:
        """For a log line: tokens, seconds to the first one, tokens per second from the first to the last."""
        usage = self._tally.usage()
        spent = 0.0 if self.first is None or self.last is None else self.last - self.first
        first = "-" if self.first is None else f"{self.first:.3f}s"
        rate = "-" if spent <= 0 else f"{(usage.completion_tokens - 1) / spent:.1f}"
        cached = usage.prompt_tokens_details.cached_tokens
        counts = f"prompt={usage.prompt_tokens} cached={cached} completion={usage.completion_tokens}"
        return f"{counts} ttft={first} tokens/s={rate}"
