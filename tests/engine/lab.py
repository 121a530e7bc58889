"""What the engine's tests share: tiny models in process, a runner that can be held and broken, whole results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.reference import Generated
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.sequence import Mailbox
from engine.types import DEFAULT_SAMPLING, FinishReason, Request, SamplingParams, TopLogprobs, Usage
from errors import TorchchatError
from models.build import build_model
from models.cache import KVCache, Rounding, Segment
from models.checkpoints import Checkpoint
from models.checkpoints.storage import LoadedTensor
from models.stable import stable_attention, stable_rows
from models.transformer import Transformer
from tests import tiny

PATIENCE = 30.0  # seconds after which a test fails instead of waiting on
NEAR = 1e-4  # margin below which float32 rounding may flip a choice


@cache
def a_model(seed: int = 0, **overrides: Any) -> Transformer:
    """A random float32 model; see tiny_config for what can be overridden."""
    config = tiny.tiny_config(**{"context_length": 1024, **overrides})
    tensors = {name: LoadedTensor(t, mapped=False) for name, t in tiny.random_tensors(config, seed).items()}
    return build_model(Checkpoint(Path("tiny"), "pytorch", config, tensors, Path()), dtype=torch.float32)


@cache
def stable_sizes(model: Transformer) -> tuple[Rounding, int]:
    """What --deterministic rounds to on this machine."""
    with torch.inference_mode():
        rounding, multiple = stable_attention(model.config, torch.float32), stable_rows(model, torch.float32)
    if rounding is None or multiple is None:
        pytest.skip("this machine has no sizes that give the same bits")
    return rounding, multiple


class HeldRunner(Runner):
    """Records every step's segments. While `held`, each step waits in `forward` for `permit`; `fault` may raise or
    spoil the logits."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: list[list[Segment]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.held = False
        self.fault: Callable[[Sequence[Segment], Tensor], Tensor] = lambda segments, logits: logits
        self._entered, self._permits = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, segments: Sequence[Segment], tokens: Sequence[int], wanted: Sequence[int]) -> Tensor:
        self.steps.append(list(segments))
        if self.held:
            self._entered.release()
            assert self._permits.acquire(timeout=PATIENCE)
        return self.fault(segments, super().forward(segments, tokens, wanted))

    def copy(self, source: int, target: int, length: int) -> None:
        self.copies.append((source, target, length))
        super().copy(source, target, length)

    def wait(self) -> list[Segment]:
        """Until the engine stands before a step: that step's segments."""
        assert self._entered.acquire(timeout=PATIENCE)
        return self.steps[-1]

    def permit(self) -> None:
        """Let the step run that `wait` told of."""
        self._permits.release()

    def let_go(self) -> None:
        """From now on without waiting."""
        self.held = False
        for _ in range(1000):
            self._permits.release()


@contextmanager
def running(
    model: Transformer,
    *,
    rows: int = 4,
    context: int = 128,
    eos_ids: frozenset[int] = frozenset(),
    max_queue: int = 64,
    stable: bool = False,
    held: bool = False,
    **scheduling: Any,
) -> Iterator[Engine]:
    """An engine over a HeldRunner; `scheduling`: Scheduler's reuse, chunk and shared_chunk."""
    rounding, multiple = stable_sizes(model) if stable else (Rounding(), 1)
    kv = KVCache(model.config, rows, context, dtype=torch.float32, rounding=rounding)
    runner = HeldRunner(model, kv, row_multiple=multiple)
    runner.held = held
    engine = Engine(
        runner,
        Scheduler(rows, **scheduling),
        context_length=context,
        vocab_size=model.config.vocab_size,
        eos_ids=eos_ids,
        max_queue=max_queue,
    ).start()
    try:
        yield engine
    finally:
        runner.let_go()
        engine.stop()


def held(engine: Engine) -> HeldRunner:
    assert isinstance(engine.runner, HeldRunner)
    return engine.runner


def params(**given: Any) -> SamplingParams:
    """Complete parameters; greedy unless a temperature is given."""
    return replace(DEFAULT_SAMPLING, **{"temperature": 0.0, **given})


def a_prompt(length: int, seed: int = 0, vocabulary: int = 320) -> list[int]:
    return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Result:
    """One request's events, put together."""

    tokens: list[int] = field(default_factory=list)  # the end token included
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[tuple[float, TopLogprobs] | None] | None = None
    finish: FinishReason | None = None
    error: TorchchatError | None = None
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))

    @property
    def text(self) -> tuple[Any, ...]:
        """Everything that invariant 6 speaks of: bit for bit."""
        return self.tokens, self.logprobs, self.top_logprobs, self.prompt_logprobs, self.finish


def read(mailbox: Mailbox, count: int = 1) -> list[Result]:
    """Every stream to its end. Checks that each has one terminal event and nothing after it."""
    results, waits = [Result() for _ in range(count)], 0
    for item in mailbox:
        if item is None:
            waits += 1
            assert waits * 0.05 < PATIENCE, "nothing comes"
            continue
        index, event = item
        result = results[index]
        assert result.finish is None, "an event after the terminal one"
        if event.token_id is not None:
            result.tokens.append(event.token_id)
            result.logprobs.append(event.logprob)
            result.top_logprobs.append(event.top_logprobs)
        if event.prompt_logprobs is not None:
            assert result.prompt_logprobs is None and len(result.tokens) <= 1
            result.prompt_logprobs = event.prompt_logprobs
        assert event.usage.completion == len(result.tokens)
        result.finish, result.error, result.usage = event.finish, event.error, event.usage
    assert all(r.finish is not None for r in results)
    assert mailbox._events.empty()
    return results


def generate(engine: Engine, *requests: Request) -> list[Result]:
    return read(engine.submit(requests), len(requests))


def one(engine: Engine, prompt: Sequence[int], **given: Any) -> Result:
    return generate(engine, Request(prompt, params(**given)))[0]


def agrees(result: Result, expected: Generated) -> int:
    """How many tokens equal the reference's: all, or those before a choice that rounding may flip."""
    for i, (ours, theirs) in enumerate(zip(result.tokens, expected.tokens, strict=False)):
        if ours != theirs:
            assert expected.margins[i] < NEAR, f"token {i}: {ours}, not {theirs}, by {expected.margins[i]}"
            return i
        if result.logprobs[i] is not None:
            assert result.logprobs[i] == pytest.approx(expected.logprobs[i], abs=NEAR)
    assert (len(result.tokens), result.finish) == (len(expected.tokens), expected.finish)
    assert (result.usage.prompt, result.usage.completion) == (expected.usage.prompt, expected.usage.completion)
    return len(expected.tokens)
