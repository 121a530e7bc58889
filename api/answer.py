"""What both completion routes share: the plan of an answer, its constant keys, and its token counts."""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from api.service import Service
from api.types import CompletionTokensDetails, FinishReason, PromptTokensDetails, UsageStats
from engine.types import Request
from errors import EngineError, UnavailableError
from models.dialects.decode import TextEvent, TextStream, Usage, decode_stream

Chunk = TypeVar("Chunk")

LOWEST_LOGPROB = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True)
class Answer(Generic[Chunk]):
    """How one HTTP request is answered: what the engine shall make, how its text reads, and the two forms.

    `chunks` turns text events into the wire's chunks, passing on None where nothing is to be sent, and raises the
    tree of errors.py when a choice fails. `collect` folds the same chunks into the whole answer.
    """

    requests: list[Request]
    per_prompt: int  # choices that share a prompt
    stop: tuple[str, ...]
    strip_first_space: bool
    want_logprobs: bool
    stream: bool
    chunks: Callable[[Iterable[TextEvent | None]], Iterator[Chunk | None]]
    collect: Callable[[Iterable[Chunk | None]], object]

    def start(self, service: Service) -> TextStream:
        """Submit the requests; the caller closes the stream. Raises what EngineProtocol.submit raises."""
        return decode_stream(
            service.engine.submit(self.requests),
            service.tokenizer,
            stop=self.stop,
            strip_first_space=self.strip_first_space,
            want_logprobs=self.want_logprobs,
            prompts=[request.prompt for request in self.requests],
        )


@dataclass(frozen=True, slots=True)
class Head:
    """The keys that are the same in every chunk of an answer."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str


def head(service: Service, prefix: str, now: float) -> Head:
    """A fresh answer's head; its id is `prefix` and a random number."""
    return Head(f"{prefix}-{uuid.uuid4().hex}", int(now), service.model_id, fingerprint(service.info))


def fingerprint(info: Mapping[str, str]) -> str:
    """Names the configuration that computes the answers: another one may round, so sample, differently."""
    return "fp_" + hashlib.sha256(repr(sorted(info.items())).encode()).hexdigest()[:12]


class Tally:
    """Counts an answer's tokens over its choices, `per_prompt` of which share each prompt."""

    def __init__(self, per_prompt: int) -> None:
        self._per_prompt = per_prompt
        self._usage: dict[int, Usage] = {}

    def add(self, event: TextEvent) -> None:
        self._usage[event.choice] = event.usage

    def usage(self) -> UsageStats:
        """Each prompt once (as its first choice found the cache), every choice's completion."""
        firsts = [usage for choice, usage in self._usage.items() if choice % self._per_prompt == 0]
        prompt = sum(usage.prompt for usage in firsts)
        completion = sum(usage.completion for usage in self._usage.values())
        return UsageStats(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(usage.cached for usage in firsts)),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=0),
        )


def finish_reason(event: TextEvent) -> FinishReason | None:
    """The event's finish as the wire knows it. Raises when the choice failed or was cancelled."""
    if event.finish == "error":
        raise event.error if event.error is not None else EngineError("The engine failed.")
    if event.finish == "cancelled":
        raise UnavailableError("The server stopped this request: it is shutting down.")
    return event.finish


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
