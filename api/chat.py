"""Chat completions: POST /chat, /v1/chat, /v1/chat/completions."""

from __future__ import annotations

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
    ChatLogprob,
    ChatLogprobs,
    ChunkDelta,
    CompletionChoice,
    CompletionChoiceChunk,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChunk,
    FinishReason,
    RequestMessage,
    ResponseMessage,
    TopLogprob,
    UsageStats,
)
from engine.types import Request
from errors import RequestError
from models.dialects.decode import TextEvent, TokenLogprob

# Roles that templates don't know under the wire's name.
TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
# Names that a template gets from us; chat_template_kwargs can't replace them.
RESERVED_KWARGS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
MAX_TOP_LOGPROBS = 20


def answer(request: CompletionRequest, service: Service) -> Answer[CompletionResponseChunk]:
    """The plan for one chat request. Raises RequestError."""
    options = request.stream_options
    logprobs = request.logprobs is True
    include_usage = not request.stream or (options is not None and options.include_usage is True)
    requests = to_requests(request, service)
    return Answer(
        requests=requests,
        per_prompt=len(requests),
        stop=tuple(request.stop if request.stop is not None else ()),
        strip_first_space=service.tokenizer.strips_first_space,
        want_logprobs=logprobs,
        stream=request.stream is True,
        chunks=partial(
            chunks,
            head=head(service, "chatcmpl", time.time()),
            n=len(requests),
            logprobs=logprobs,
            include_usage=include_usage,
        ),
        collect=collect,
    )


def to_requests(request: CompletionRequest, service: Service) -> list[Request]:
    """One engine request per choice. Raises RequestError, also with a template's own message."""
    if service.strict_model and request.model is not None:
        require_model(service, request.model)
    if not request.messages:
        raise RequestError("messages must have at least one message.", param="messages")
    validation.require_tokens(request)
    n = validation.choices(request, service)
    params = validation.sampling(request, service, logprobs=_logprobs(request))
    messages = [_message(message, index) for index, message in enumerate(request.messages)]
    prompt = service.dialect.render(messages, **_template_kwargs(request))
    return [Request(prompt, params, choice=choice) for choice in range(n)]


def _logprobs(request: CompletionRequest) -> int | None:
    """logprobs and top_logprobs as the engine's one number."""
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {top}.", param="top_logprobs")
    if request.logprobs:
        return 0 if top is None else top
    if top:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


def _message(message: RequestMessage, index: int) -> dict[str, Any]:
    """A message as templates expect it: keys that are not given are not there."""
    if message.content is None and message.role != "assistant":
        where = f"messages[{index}].content"
        raise RequestError(f"{where}: a {message.role} message needs content.", param=where)
    rest = {
        "name": message.name,
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    role = TEMPLATE_ROLES.get(message.role, message.role)
    content = "" if message.content is None and not message.tool_calls else message.content
    return {"role": role, "content": content} | {key: value for key, value in rest.items() if value}


def _template_kwargs(request: CompletionRequest) -> dict[str, Any]:
    """What the request tells the template: reasoning_effort, and chat_template_kwargs over it."""
    kwargs: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        kwargs["enable_thinking"] = request.reasoning_effort != "none"
    if request.chat_template_kwargs is not None:
        for name in RESERVED_KWARGS & request.chat_template_kwargs.keys():
            raise RequestError(f"chat_template_kwargs can't set {name!r}.", param="chat_template_kwargs")
        kwargs |= request.chat_template_kwargs
    return kwargs


def chunks(
    events: Iterable[TextEvent | None], *, head: Head, n: int, logprobs: bool, include_usage: bool
) -> Iterator[CompletionResponseChunk | None]:
    """The text events of `n` choices as the stream's chunks; None where there is nothing to send.

    Each choice begins with its role chunk, at once, so that the client has its headers while it waits for a row, and
    ends with its finish chunk; the usage chunk, if asked for, is last. Raises what made a choice fail.
    """
    chunk = partial(
        CompletionResponseChunk,
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        usage=None if include_usage else MISSING,
    )
    tally = Tally(per_prompt=n)
    for index in range(n):
        first = ChatLogprobs(content=[]) if logprobs else None
        yield chunk(choices=[_choice(index, ChunkDelta(role="assistant", content=""), first)])
    for event in events:
        if event is None:
            yield None
            continue
        finish = finish_reason(event)
        tally.add(event)
        if event.text or (logprobs and event.logprobs):
            entries = _chat_logprobs(event.logprobs) if logprobs else None
            yield chunk(choices=[_choice(event.choice, ChunkDelta(content=event.text), entries)])
        if finish is not None:
            yield chunk(choices=[_choice(event.choice, ChunkDelta(), finish=finish)])
        yield None
    if include_usage:
        yield chunk(choices=[], usage=tally.usage())


def _choice(
    index: int, delta: ChunkDelta, logprobs: ChatLogprobs | None = None, finish: FinishReason | None = None
) -> CompletionChoiceChunk:
    return CompletionChoiceChunk(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=token.token,
                logprob=finite(token.logprob),
                bytes=list(token.bytes),
                top_logprobs=[
                    TopLogprob(token=top.token, logprob=finite(top.logprob), bytes=list(top.bytes)) for top in token.top
                ],
            )
            for token in tokens
        ]
    )


@dataclass(slots=True)
class _Folded:
    """One choice as collected so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] | None = None
    finish: FinishReason | None = None

    def add(self, choice: CompletionChoiceChunk) -> None:
        if isinstance(choice.delta.content, str):
            self.text.append(choice.delta.content)
        if choice.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(choice.logprobs.content)
        if choice.finish_reason is not None:
            self.finish = choice.finish_reason


def collect(chunks: Iterable[CompletionResponseChunk | None]) -> CompletionResponse:
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
    return CompletionResponse(
        id=last.id,
        created=last.created,
        model=last.model,
        choices=[_whole(index, folded[index]) for index in sorted(folded)],
        usage=last.usage,
        system_fingerprint=last.system_fingerprint,
    )


def _whole(index: int, folded: _Folded) -> CompletionChoice:
    assert folded.finish is not None, "every choice has its finish chunk"
    return CompletionChoice(
        index=index,
        message=ResponseMessage(role="assistant", content="".join(folded.text)),
        finish_reason=folded.finish,
        logprobs=None if folded.logprobs is None else ChatLogprobs(content=folded.logprobs),
    )
