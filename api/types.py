"""The wire's dataclasses: what a client sends, what it gets, in the key order it gets it.

Field names are those of the OpenAI specification (v2.3.0), class names torchchat's. In answers an absent key is
MISSING and null is None; nothing is left out for being falsy. In requests null means absent, so both are None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import MISSING, BeforeValidator, Strict, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError


def _integral(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is the integer 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flag(value: Any) -> Any:
    """The strings "true" and "false", which torchchat's curl lines send, as the booleans they mean."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _stops(value: Any) -> Any:
    """null, "" and [] are no stop strings, one string is a list of one, and an empty one in a list stops nothing."""
    values = [value] if isinstance(value, str) else value
    return [v for v in values if v != ""] if isinstance(values, list) else values


def _joined(value: Any) -> Any:
    """A message's content as one string: a string, or a list of text parts."""
    return "".join(_part_text(part) for part in value) if isinstance(value, list) else value


def _part_text(part: Any) -> str:
    kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, dict) else None
    text = part if isinstance(part, str) else part.get(kind) if isinstance(part, dict) else None
    if kind in ("text", "refusal") and isinstance(text, str):
        return text
    problem = f"content part {kind!r} has no text" if kind == "text" else f"content parts of type {kind!r} are not read"
    raise PydanticCustomError("content", "{problem}: this model takes text", {"problem": problem})


Int = Annotated[int, Strict(), BeforeValidator(_integral)]  # never a bool or a string
Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]
Flag = Annotated[bool, Strict(), BeforeValidator(_flag)]
Stops = Annotated[list[str], BeforeValidator(_stops)]
Content = Annotated[str | None, BeforeValidator(_joined)]
Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


# --- requests


@dataclass(kw_only=True, slots=True)
class StreamOptions:
    include_usage: Bool | None = None


@dataclass(kw_only=True, slots=True)
class SamplingFields:
    """What both completion routes take. Names shared with engine.types.SamplingParams mean the same; its `validate`
    has the ranges."""

    model: str | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    stop: Stops | None = None
    stop_token_ids: list[Int] | None = None
    temperature: Float | None = None
    top_k: Int | None = None
    top_p: Float | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    logit_bias: dict[int, Float] | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None  # wins over max_tokens
    min_tokens: Int | None = None
    ignore_eos: Bool | None = None


@dataclass(kw_only=True, slots=True)
class RequestMessage:
    """One message of a conversation. `tool_calls` is handed to the template as it came."""

    role: Role
    content: Content = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


@dataclass(kw_only=True, slots=True)
class CompletionRequest(SamplingFields):
    """POST /chat, /v1/chat, /v1/chat/completions."""

    messages: list[RequestMessage]
    logprobs: Bool | None = None
    top_logprobs: Int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(kw_only=True, slots=True)
class TextCompletionRequest(SamplingFields):
    """POST /v1/completions. `prompt` takes four forms; api.completions tells them apart."""

    prompt: Any
    echo: Bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None


# --- answers


@dataclass(kw_only=True, slots=True)
class PromptTokensDetails:
    cached_tokens: int


@dataclass(kw_only=True, slots=True)
class CompletionTokensDetails:
    reasoning_tokens: int


@dataclass(kw_only=True, slots=True)
class UsageStats:
    """Token counts of a whole answer: each prompt once, the completions of all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


@dataclass(kw_only=True, slots=True)
class TopLogprob:
    token: str
    logprob: float
    bytes: list[int]


@dataclass(kw_only=True, slots=True)
class ChatLogprob:
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@dataclass(kw_only=True, slots=True)
class ChatLogprobs:
    content: list[ChatLogprob]
    refusal: None = None


FinishReason = Literal["stop", "length"]


@dataclass(kw_only=True, slots=True)
class ResponseMessage:
    role: Literal["assistant"]
    content: str | None
    refusal: None = None


@dataclass(kw_only=True, slots=True)
class CompletionChoice:
    index: int
    message: ResponseMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


@dataclass(kw_only=True, slots=True)
class CompletionResponse:
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageStats
    system_fingerprint: str


@dataclass(kw_only=True, slots=True)
class ChunkDelta:
    role: Literal["assistant"] | MISSING = MISSING
    content: str | MISSING | None = MISSING


@dataclass(kw_only=True, slots=True)
class CompletionChoiceChunk:
    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(kw_only=True, slots=True)
class CompletionResponseChunk:
    """One event of a streamed chat completion. `usage` is a key only when the request asked for usage."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoiceChunk]
    usage: UsageStats | MISSING | None = MISSING


@dataclass(kw_only=True, slots=True)
class TextLogprobs:
    """Log-probabilities of a text completion, one entry per token in each list; offsets count characters of `text`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass(kw_only=True, slots=True)
class TextCompletionChoice:
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(kw_only=True, slots=True)
class TextCompletionResponse:
    """A text completion: whole, or one event of a streamed one, which have the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextCompletionChoice]
    usage: UsageStats | MISSING | None = MISSING


@dataclass(kw_only=True, slots=True)
class ModelInfo:
    """A served model. `max_model_len` is the context in tokens (vLLM's name for it)."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


@dataclass(kw_only=True, slots=True)
class ModelInfoList:
    object: Literal["list"] = "list"
    data: list[ModelInfo]


# pydantic's compiled reader and writer of a wire type
adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def dump(value: object) -> bytes:
    """The JSON of an answer, one line of UTF-8."""
    return adapter(type(value)).dump_json(value)
