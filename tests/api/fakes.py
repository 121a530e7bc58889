"""A service without a model: a byte tokenizer, a plain dialect, and an engine that plays scripts.

`python -m tests.api.fakes` serves it, for tests that need a process of its own.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from waitress import wasyncore

import server
from api.service import Service, State
from engine.types import DEFAULT_SAMPLING, EngineStats, Request, TokenEvent, Usage
from errors import ContextLengthError, EngineError, QueueFullError, TorchchatError

END = 257
MODEL = "Tiny/Model-1B"
Script = Iterable[int | TorchchatError | None]  # a token, nothing for a while, a failure


class ByteTokenizer:
    """256 bytes, BOS and an end token."""

    vocab_size = 258
    bos_id: int | None = 256
    add_bos = True
    stop_ids = frozenset({END})
    special_tokens: Mapping[str, int] = {"<s>": 256, "</s>": END}
    strips_first_space = False

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        ids = [256] if bos else []
        pieces = text.split("</s>") if special else [text]
        for i, piece in enumerate(pieces):
            ids += ([END] if i else []) + list(piece.encode())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        if token_id >= 256:
            return {256: "<s>", 257: "</s>"}[token_id]
        return self.token_bytes(token_id).decode(errors="replace")


class PlainDialect:
    """role:content lines; remembers what it was asked to render."""

    is_chat = True

    def __init__(self) -> None:
        self.rendered: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, **kwargs: Any) -> list[int]:
        self.rendered.append(([dict(message) for message in messages], kwargs))
        text = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
        return [256, *text.encode()]


class FakeSubmission:
    def __init__(self, engine: FakeEngine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._cancelled = [threading.Event() for _ in requests]
        self._streams = [engine.play(request, gone) for request, gone in zip(requests, self._cancelled, strict=True)]
        self._running = True
        engine.change(+len(requests))

    def __iter__(self) -> Iterator[tuple[int, TokenEvent] | None]:
        live = dict(enumerate(self._streams))
        while live:  # one event of each in turn
            for index in list(live):
                event = next(live[index])
                if event is not None and event.finish is not None:
                    del live[index]
                    assert event.finish is not None
                    self._engine.finished[event.finish] += 1
                yield None if event is None else (index, event)

    def cancel(self, index: int) -> None:
        self._cancelled[index].set()

    def close(self) -> None:
        for gone in self._cancelled:
            gone.set()
        if self._running:
            self._running = False
            self._engine.change(-len(self._streams))


class FakeEngine:
    """Plays `script(request)`; then the end token. Every submitted request is kept in `seen`."""

    context_length = 1024
    rows = 4

    def __init__(self) -> None:
        self.script: Callable[[Request], Script] = lambda request: b"Once upon a time."
        self.alive = True
        self.full = False
        self.seen: list[Request] = []
        self.running = 0
        self.finished: Counter[str] = Counter()
        self.changed = threading.Condition()
        self.closed = threading.Event()
        self.pace = 0.0  # seconds per event
        self.cached = 0

    def submit(self, requests: Sequence[Request]) -> FakeSubmission:
        if self.full:
            raise QueueFullError("The queue is full.")
        for request in requests:
            if len(request.prompt) >= self.context_length:
                raise ContextLengthError(f"The prompt has {len(request.prompt)} tokens.", param="messages")
        self.seen += requests
        return FakeSubmission(self, requests)

    def play(self, request: Request, gone: threading.Event) -> Iterator[TokenEvent | None]:
        count = 0

        def event(token: int | None, **more: Any) -> TokenEvent:
            usage = Usage(len(request.prompt), count, self.cached)
            top = [] if token is None else [(token, -0.25), (ord("z"), float("-inf"))][: request.params.logprobs or 0]
            logprob = None if token is None else -0.25
            prompt = None
            if count <= 1 and request.prompt_logprobs is not None:
                entries = [(-1.0, [(ord("z"), -0.5)][: request.prompt_logprobs]) for _ in request.prompt]
                prompt = [None, *entries[1:]]
            return TokenEvent(token, usage, logprob, top, prompt_logprobs=prompt, **more)

        for item in self.script(request):
            if request.params.max_tokens == count:
                yield event(None, finish="length")
                return
            if self.pace:
                gone.wait(self.pace)
            if gone.is_set() or self.closed.is_set():
                yield event(None, finish="cancelled")
                return
            if isinstance(item, TorchchatError):
                yield event(None, finish="error", error=item)
                return
            if item is None:
                yield None
                continue
            count += 1
            yield event(item)
        if request.params.max_tokens == count:
            yield event(None, finish="length")
            return
        count += 1
        yield event(END, finish="stop")

    def change(self, by: int) -> None:
        with self.changed:
            self.running += by
            self.changed.notify_all()

    def wait_running(self, count: int, seconds: float = 5.0) -> bool:
        """Whether exactly `count` requests run within that time."""
        with self.changed:
            return self.changed.wait_for(lambda: self.running == count, seconds)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.running,
            waiting=0,
            rows=self.rows,
            requests=self.finished,
            prompt_tokens=11,
            cached_tokens=7,
            generation_tokens=5,
            alive=self.alive,
        )


class FakeService:
    def __init__(self) -> None:
        self.model_id = MODEL
        self.created = 1_700_000_000
        self.state: State = "ready"
        self.problem: str | None = None
        self.engine = FakeEngine()
        self.tokenizer = ByteTokenizer()
        self.dialect = PlainDialect()
        self.defaults = DEFAULT_SAMPLING
        self.info = {"version": "0", "model": MODEL, "device": "cpu", "dtype": "float32", "quantize": "none"}
        self.strict_model = False
        self.max_choices = 8

    def drain(self) -> None:
        self.state = "draining"

    def close(self) -> None:
        self.engine.closed.set()


@contextmanager
def serving(service: Service, threads: int = 16) -> Iterator[int]:
    """waitress around `service`, as server.run has it, on a free port."""
    running = server.bind(service, host="127.0.0.1", port=0, threads=threads)
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            wasyncore.loop(timeout=0.05, use_poll=True, map=running._map, count=1)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield int(running.effective_port)
    finally:
        service.close()
        stop.set()
        thread.join()
        running.task_dispatcher.shutdown(timeout=5)
        wasyncore.close_all(running._map)


def failing(after: bytes, error: TorchchatError | None = None) -> Callable[[Request], Script]:
    """A script that says `after` and then fails."""
    return lambda request: [*after, error if error is not None else EngineError("step failed")]


def endless(request: Request) -> Script:
    """A story without an end."""
    return itertools.cycle(b"and then ")


def main(behaviour: str, grace: str) -> int:
    """Serve on a free port, which the log names, until a signal."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    service = FakeService()
    if behaviour == "endless":
        service.engine.script, service.engine.pace = endless, 0.01
    elif behaviour == "dead":
        service.state, service.problem = "dead", "weights.gguf: no such file"
    return server.run(service, port=0, grace=float(grace))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
