"""A running request: what it has, what it still needs, and where its events go."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List

import torch
from torch import Tensor

from engine.sampling import adjust, adjusts, uniform
from engine.types import FinishReason, Request, TokenEvent, TopLogprobs, Usage
from errors import TorchchatError

TICK = 0.05  # seconds without an event after which a reader hears None


class Mailbox:
    """The Submission that submit returns: the engine thread puts, one reader iterates."""

    def __init__(self, count: int) -> None:
        self._events: queue.SimpleQueue[tuple[int, TokenEvent]] = queue.SimpleQueue()
        self._open = count
        self.cancelled = [False] * count
        self.on_cancel: Callable[[], None] | None = None  # wakes the engine

    def put(self, index: int, event: TokenEvent) -> None:
        self._events.put((index, event))

    def __iter__(self) -> Iterator[tuple[int, TokenEvent] | None]:
        while self._open:
            try:
                item = self._events.get(timeout=TICK)
            except queue.Empty:
                yield None
                continue
            self._open -= item[1].finish is not None
            yield item

    def cancel(self, index: int) -> None:
        if not self.cancelled[index]:
            self.cancelled[index] = True
            if self.on_cancel is not None:
                self.on_cancel()

    def close(self) -> None:
        for index in range(len(self.cancelled)):
            self.cancel(index)


class Sequence:
    """One request from submit to its terminal event. Only the engine thread touches it after submit."""

    def __init__(self, request: Request, seed: int, limit: int, eos_ids: frozenset[int], mailbox: Mailbox, index: int):
        params = request.params
        self.request, self.params, self.seed = request, params, seed
        self.mailbox, self.index = mailbox, index
        self.tokens = list(request.prompt)  # prompt, then what was generated
        self.limit = limit  # completion tokens allowed, the context's rest included
        self.stop_ids = params.stop_ids if params.ignore_eos else params.stop_ids | eos_ids
        self.row: int | None = None
        self.order = 0  # when it got its row: smaller is earlier
        self.done = 0  # tokens whose keys and values are in the cache
        self.cached = 0  # of these, how many were there already
        self.adjusts = adjusts(params)
        self.finished: FinishReason | None = None
        self._last: TokenEvent | None = None  # the terminal event, from `finish` to `close`
        self._history: tuple[Tensor, Tensor] | None = None
        self._prompt_logprobs: list[tuple[float, TopLogprobs] | None] | None = (
            None if request.prompt_logprobs is None else [None]
        )

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def completion(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def prefilling(self) -> bool:
        """More than the last token is missing from the cache."""
        return self.done < self.prompt_length

    @property
    def cancelled(self) -> bool:
        return self.mailbox.cancelled[self.index]

    def usage(self) -> Usage:
        return Usage(self.prompt_length, self.completion, self.cached)

    def uniform(self) -> float:
        """The random number for the next token: a function of seed, choice and position alone."""
        return uniform(self.seed, self.request.choice, self.completion)

    def adjusted(self, logits: Tensor) -> Tensor:
        """The row's logits (V,) with this request's penalties, bias and bans."""
        if not self.adjusts:
            return logits
        if self._history is None:
            prompt = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            prompt[list(self.request.prompt)] = True
            self._history = prompt, torch.zeros_like(logits)
        banned = self.stop_ids if self.completion < self.params.min_tokens else ()
        return adjust(logits, self.params, *self._history, list(banned))

    def add_prompt_logprobs(self, entries: List[tuple[float, TopLogprobs]]) -> None:
        assert self._prompt_logprobs is not None
        self._prompt_logprobs.extend(entries)

    def add(self, token_id: int, logprob: float | None, top: TopLogprobs) -> None:
        """Take a sampled token, tell the reader, and finish if it was the last."""
        self.tokens.append(token_id)
        if self._history is not None:
            self._history[1][token_id] += 1
        if token_id in self.stop_ids:
            self.finish("stop", token_id=token_id, logprob=logprob, top=top)
            return
        self._send(TokenEvent(token_id, self.usage(), logprob, top, prompt_logprobs=self._take_prompt_logprobs()))
        if self.completion >= self.limit:
            self.finish("length")

    def finish(
        self,
        reason: FinishReason,
        *,
        error: TorchchatError | None = None,
        token_id: int | None = None,
        logprob: float | None = None,
        top: TopLogprobs = (),
    ) -> None:
        """Settle how it ends; later calls do nothing. `close` tells the reader."""
        if self.finished is not None:
            return
        self.finished = reason
        scored = self._take_prompt_logprobs()
        self._last = TokenEvent(token_id, self.usage(), logprob, top, reason, error, prompt_logprobs=scored)

    def close(self) -> None:
        """Send the terminal event: once, and when the row is free, so that who reads it may count on the row."""
        if self._last is not None:
            self._send(self._last)
            self._last = None

    def _take_prompt_logprobs(self) -> List[tuple[float, TopLogprobs] | None] | None:
        taken, self._prompt_logprobs = self._prompt_logprobs, None
        return taken

    def _send(self, event: TokenEvent) -> None:
        self.mailbox.put(self.index, event)
