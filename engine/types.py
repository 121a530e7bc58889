"""What crosses the engine's border: options, requests, events. No torch here, so that the command line and
the wire can import it for nothing.

Each generation parameter is declared once, in SamplingParams; the command line builds its options from the
fields' metadata and the wire its checks from `validate`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from errors import RequestError, TorchchatError

SEED_LIMIT = 2**63


def _param(help: str, *, low: float | None = None, high: float | None = None, flag: str | None = None) -> Any:
    """A SamplingParams field: absent by default, `low`..`high` inclusive, `flag` its command-line name if unusual."""
    return field(default=None, metadata={"help": help, "low": low, "high": high, "flag": flag})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Every field is None until given: see `over` and DEFAULT_SAMPLING. After that only those typed `| None` can be.
    """

    temperature: float = _param("Randomness; 0 always takes the likeliest token.", low=0.0, high=2.0)
    top_k: int = _param("Sample among the k likeliest tokens; 0 or -1 for all.", low=-1)
    top_p: float = _param("Sample among the likeliest tokens that together reach this probability.", low=0.0, high=1.0)
    min_p: float = _param("Drop tokens below this share of the likeliest token's probability.", low=0.0, high=1.0)
    repetition_penalty: float = _param(
        "Divide the logits of tokens seen in prompt or output; 1 is off.", low=0.01, high=100.0
    )
    presence_penalty: float = _param(
        "Subtract once from the logit of every token already generated.", low=-2.0, high=2.0
    )
    frequency_penalty: float = _param("Subtract for each time a token was generated.", low=-2.0, high=2.0)
    logit_bias: Mapping[int, float] = _param(
        "Add X to the logit of token ID, -100..100. Repeatable.", low=-100.0, high=100.0
    )
    seed: int | None = _param("Same seed, same text; -1 for a random one.", low=-SEED_LIMIT, high=SEED_LIMIT - 1)
    max_tokens: int | None = _param(
        "Stop after this many tokens; absent: up to the context.", low=0, flag="--max-new-tokens"
    )
    min_tokens: int = _param("Do not stop before this many tokens.", low=0)
    ignore_eos: bool = _param("Go on after the end token.")
    stop_ids: frozenset[int] = _param("A token id that ends the text besides the model's own. Repeatable.")
    logprobs: int | None = _param(
        "Log-probabilities: 0 for the chosen token, k for the k likeliest too.", low=0, high=20
    )

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with what is not given taken from `defaults`."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) is not None}
        return dataclasses.replace(defaults, **given)

    def validate(self) -> None:
        """Check every given value against its field's range. Raises RequestError naming the field."""
        for f in dataclasses.fields(self):
            value, low, high = getattr(self, f.name), f.metadata["low"], f.metadata["high"]
            if value is None:
                continue
            for number in value.values() if isinstance(value, Mapping) else [value]:
                if not isinstance(number, (int, float)) or isinstance(number, bool):
                    continue
                if math.isnan(number) or (low is not None and number < low) or (high is not None and number > high):
                    span = f"at least {low}" if high is None else f"between {low} and {high}"
                    raise RequestError(f"{f.name} must be {span}, got {number}.", param=f.name)


# OpenAI's defaults, and "off" for what OpenAI doesn't have. seed, max_tokens and logprobs stay absent.
DEFAULT_SAMPLING = SamplingParams(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias={},
    min_tokens=0,
    ignore_eos=False,
    stop_ids=frozenset(),
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to load and how to run it: the options that generate, chat and server share."""

    model: str
    tokenizer: Path | None = None
    chat_template: Path | None = None
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    device: str = "auto"  # auto, cpu, cuda, mps
    quantize: str | None = None  # int8, int4, or torchchat's JSON (text or a file's path)
    compile: str | None = None  # None, "default", "max"
    max_seq_length: int | None = None  # positions per row; None: min(model's, 4096)
    max_batch: int | None = None  # rows; None: 8, fewer if memory is short
    max_queue: int = 64  # requests waiting for a row
    threads: int | None = None  # None: physical cores
    deterministic: bool | None = None  # None: on where it costs nothing
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to make.

    `params` is complete (SamplingParams.over DEFAULT_SAMPLING). `choice` tells the n choices of one prompt
    apart, so that one seed gives n different texts. `prompt_logprobs` asks for the log-probabilities of the
    prompt's own tokens (the k likeliest besides); it makes the engine compute the whole prompt.
    """

    prompt: Sequence[int]
    params: SamplingParams
    choice: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens so far. `completion` counts every sampled id, the end token included; `cached` is part of `prompt`."""

    prompt: int
    completion: int
    cached: int


FinishReason = Literal["stop", "length", "cancelled", "error"]
TopLogprobs = Sequence[tuple[int, float]]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step of a request's stream.

    A token: `token_id` set, `finish` None. The one terminal event: `finish` set, nothing follows; its
    `token_id` is the end token when one was sampled (it counts in usage and has a logprob, but is no text),
    else None. `usage` is cumulative on every event. `prompt_logprobs` comes on the first event of a request
    that asked: one entry per prompt token, (logprob, top) and None for the first, which nothing precedes.
    """

    token_id: int | None
    usage: Usage
    logprob: float | None = None
    top_logprobs: TopLogprobs = ()
    finish: FinishReason | None = None
    error: TorchchatError | None = None
    prompt_logprobs: Sequence[tuple[float, TopLogprobs] | None] | None = None


class Submission(Protocol):
    """The streams of one submit, read by one thread.

    Iterating yields (index of the request, event) as events arrive, and None when nothing came for a while,
    so that the reader can look after its client; it ends when every request has had its terminal event.
    A request that was cancelled still gets its terminal event (finish "cancelled").
    """

    def __iter__(self) -> Iterator[tuple[int, TokenEvent] | None]: ...

    def cancel(self, index: int) -> None:
        """Stop one request; its row is free within one step."""

    def close(self) -> None:
        """Stop them all. Idempotent."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for /metrics and the logs."""

    running: int
    waiting: int
    rows: int
    requests: Mapping[str, int]  # finished, by finish reason
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    alive: bool = True


class EngineProtocol(Protocol):
    """What the wire needs of the engine."""

    @property
    def context_length(self) -> int:
        """Positions per row: prompt and completion together fit in it."""

    @property
    def rows(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def submit(self, requests: Sequence[Request]) -> Submission:
        """All or nothing.

        Raises ContextLengthError (a prompt leaves no room for one token), RequestError (more requests than rows and
        queue could ever hold; an id outside the vocabulary), QueueFullError, UnavailableError.
        """

    def stats(self) -> EngineStats: ...
