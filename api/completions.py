"""Text completions: POST /v1/completions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import MISSING

from api import validation
from api.answer import Answer, Head, Tally, finish_reason, finite, head
from api.service import Service, require_model
from api.types import (
    FinishReason,
    TextCompletionChoice,
    TextCompletionRequest,
    TextCompletionResponse,
    TextLogprobs,
    UsageStats,
)
from engine.types import Request
from errors import RequestError
from models.dialects.decode import TextEvent, TokenLogprob
from models.tokenizers import Tokenizer

DEFAULT_MAX_TOKENS = 16  # the specification's, and only this route's
MAX_LOGPROBS = 5


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as ids, and as the text that echo repeats."""

    ids: Sequence[int]
    text: str


def answer(request: TextCompletionRequest, service: Service) -> Answer[TextCompletionResponse]:
    """The plan for one text request. Raises RequestError."""
    options = request.stream_options
    n, best_of = _counts(request, service)
    ranked = best_of > n  # by log-probability, which the engine must then report
    logprobs = 0 if ranked and request.logprobs is None else request.logprobs
    prompts = to_prompts(request.prompt, service)
    return Answer(
        requests=to_requests(request, prompts, best_of, service, logprobs=logprobs),
        per_prompt=best_of,
        stop=tuple(request.stop if request.stop is not None else ()),
        strip_first_space=False,
        want_logprobs=logprobs is not None,
        stream=request.stream is True,
        chunks=partial(
            chunks,
            head=head(service, "cmpl", time.time()),
            n=best_of,
            logprobs=logprobs is not None,
            include_usage=not request.stream or (options is not None and options.include_usage is True),
            echo=Echo(prompts, service.tokenizer) if request.echo else None,
        ),
        collect=partial(collect_best, n=n, best_of=best_of, keep=request.logprobs is not None) if ranked else collect,
    )


def to_prompts(prompt: Any, service: Service) -> list[Prompt]:
    """The four forms, string, [string], [int] and [[int]], as a list. Raises RequestError."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(_is_id(item) for item in prompt)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists.", param="prompt"
        )
    return [_prompt(item, service) for item in prompt]


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _prompt(item: Any, service: Service) -> Prompt:
    tokenizer = service.tokenizer
    if isinstance(item, str):
        ids, text = tokenizer.encode(item, bos=tokenizer.add_bos, special=True), item
        if not ids and tokenizer.bos_id is not None:  # an empty prompt begins a text
            ids = [tokenizer.bos_id]
    elif isinstance(item, list) and all(_is_id(each) for each in item):
        validation.check_ids("prompt", item, service)
        ids, text = item, tokenizer.decode(item)
    else:
        raise RequestError("prompt: every prompt must be a string or a list of token ids.", param="prompt")
    if not ids:
        raise RequestError("prompt is empty.", param="prompt")
    return Prompt(ids, text)


def to_requests(
    request: TextCompletionRequest, prompts: Sequence[Prompt], count: int, service: Service, *, logprobs: int | None
) -> list[Request]:
    """`count` engine requests per prompt, in the order of the choices. Raises RequestError."""
    if service.strict_model and request.model is not None:
        require_model(service, request.model)
    if not (request.echo and request.max_tokens == 0):
        validation.require_tokens(request)
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise RequestError(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {request.logprobs}.", param="logprobs")
    params = validation.sampling(request, service, logprobs=logprobs)
    if params.max_tokens is None:
        params = dataclasses.replace(params, max_tokens=DEFAULT_MAX_TOKENS)
    prompt_logprobs = request.logprobs if request.echo else None
    return [Request(prompt.ids, params, choice, prompt_logprobs) for prompt in prompts for choice in range(count)]


def _counts(request: TextCompletionRequest, service: Service) -> tuple[int, int]:
    """n and best_of, which is n when not given. Raises RequestError."""
    n = validation.choices(request, service)
    best_of = n if request.best_of is None else validation.choices(request, service, "best_of")
    if best_of < n:
        raise RequestError(f"best_of must be at least n ({n}), got {best_of}.", param="best_of")
    if best_of > n and (request.stream or request.echo):
        raise RequestError("best_of above n works neither with stream nor with echo.", param="best_of")
    return n, best_of


# --- log-probabilities


class Echo:
    """The prompts as the front of their answers."""

    def __init__(self, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer

    def text(self, index: int) -> str:
        """The text of prompt `index`."""
        return self._prompts[index].text

    def logprobs(self, index: int, entries: Sequence[TokenLogprob | None]) -> TextLogprobs:
        """The log-probabilities of prompt `index`'s tokens; None for one that nothing precedes."""
        prompt, tokenizer = self._prompts[index], self._tokenizer
        sizes = [_characters(tokenizer.token_bytes(token_id)) for token_id in prompt.ids]
        # A tokenizer may put a space in front of the text that the text itself doesn't have
        offset = len(prompt.text) - sum(sizes)
        result = _no_logprobs()
        for token_id, size, entry in zip(prompt.ids, sizes, entries, strict=True):
            result.tokens.append(tokenizer.token_text(token_id))
            result.token_logprobs.append(None if entry is None else finite(entry.logprob))
            result.top_logprobs.append(None if entry is None else _top(entry))
            result.text_offset.append(max(0, offset))
            offset += size
        return result


def _no_logprobs() -> TextLogprobs:
    return TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def _characters(piece: bytes) -> int:
    """The characters that begin in `piece`: its bytes that don't continue one."""
    return sum(byte & 0xC0 != 0x80 for byte in piece)


def _top(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the chosen one. Two ids may share a name; the likelier keeps it."""
    top: dict[str, float] = {}
    for each in (*token.top, token):
        top.setdefault(each.token, finite(each.logprob))
    return top


def _text_logprobs(tokens: Iterable[TokenLogprob], offset: int) -> TextLogprobs:
    result = _no_logprobs()
    for token in tokens:
        result.tokens.append(token.token)
        result.token_logprobs.append(finite(token.logprob))
        result.top_logprobs.append(_top(token))
        result.text_offset.append(offset)
        offset += _characters(token.bytes)
    return result


# --- answers


def chunks(
    events: Iterable[TextEvent | None], *, head: Head, n: int, logprobs: bool, include_usage: bool, echo: Echo | None
) -> Iterator[TextCompletionResponse | None]:
    """The text events of `n` choices per prompt as the stream's chunks; None where there is nothing to send.

    A choice's echo comes before its text, its finish last with no text. Raises what made a choice fail.
    """
    chunk = partial(
        TextCompletionResponse,
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        usage=None if include_usage else MISSING,
    )
    tally = Tally(per_prompt=n)
    offsets: dict[int, int] = {}  # characters sent, by choice
    for event in events:
        if event is None:
            yield None
            continue
        finish, index = finish_reason(event), event.choice
        tally.add(event)
        if index not in offsets:
            offsets[index] = 0
            if echo is not None:
                text, entries = echo.text(index // n), None
                if event.prompt_logprobs is not None:
                    entries = echo.logprobs(index // n, event.prompt_logprobs)
                offsets[index] = len(text)
                yield chunk(choices=[TextCompletionChoice(index=index, text=text, logprobs=entries)])
        if event.text or (logprobs and event.logprobs):
            entries = _text_logprobs(event.logprobs, offsets[index]) if logprobs else None
            offsets[index] += len(event.text)
            yield chunk(choices=[TextCompletionChoice(index=index, text=event.text, logprobs=entries)])
        if finish is not None:
            nothing = _no_logprobs() if logprobs else None
            yield chunk(choices=[TextCompletionChoice(index=index, text="", logprobs=nothing, finish_reason=finish)])
        yield None
    if include_usage:
        yield chunk(choices=[], usage=tally.usage())


@dataclass(slots=True)
class _Folded:
    """One choice as collected so far."""

    text: list[str] = field(default_factory=list)
    logprobs: TextLogprobs | None = None
    finish: FinishReason | None = None

    def add(self, choice: TextCompletionChoice) -> None:
        self.text.append(choice.text)
        self.finish = choice.finish_reason
        if choice.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = _no_logprobs()
            for f in dataclasses.fields(choice.logprobs):
                getattr(self.logprobs, f.name).extend(getattr(choice.logprobs, f.name))

    def whole(self, index: int) -> TextCompletionChoice:
        return TextCompletionChoice(
            index=index, text="".join(self.text), logprobs=self.logprobs, finish_reason=self.finish
        )


def collect(chunks: Iterable[TextCompletionResponse | None]) -> TextCompletionResponse:
    """The whole answer, folded from a stream that has its usage chunk."""
    folded: dict[int, _Folded] = {}
    last = None
    for chunk in chunks:
        if chunk is None:
            continue
        last = chunk
        for choice in chunk.choices:
            folded.setdefault(choice.index, _Folded()).add(choice)
    assert last is not None and isinstance(last.usage, UsageStats), "collect needs the usage chunk"
    return dataclasses.replace(last, choices=[folded[index].whole(index) for index in sorted(folded)])


def collect_best(
    chunks: Iterable[TextCompletionResponse | None], *, n: int, best_of: int, keep: bool
) -> TextCompletionResponse:
    """The `n` likeliest per token of each prompt's `best_of` choices; their logprobs only if `keep`."""
    response = collect(chunks)
    best: list[TextCompletionChoice] = []
    for start in range(0, len(response.choices), best_of):
        candidates = sorted(response.choices[start : start + best_of], key=_mean_logprob, reverse=True)
        best += [
            dataclasses.replace(choice, index=len(best) + i, logprobs=choice.logprobs if keep else None)
            for i, choice in enumerate(candidates[:n])
        ]
    return dataclasses.replace(response, choices=best)


def _mean_logprob(choice: TextCompletionChoice) -> float:
    values = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    return sum(value for value in values if value is not None) / max(1, len(values))
