"""How chunks travel: server-sent events, or one JSON per line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from api.errors import error_body
from api.types import dump
from errors import TorchchatError

PING_SECONDS = 10.0  # of silence
PING = b": ping\n\n"  # a comment: events without data crash openai-python
DONE = b"data: [DONE]\n\n"


def sse(chunks: Iterable[object | None], clock: Callable[[], float] = time.monotonic) -> Iterator[bytes]:
    """Server-sent events, then [DONE]; after an error its event and nothing else. None keeps the line alive."""
    last = clock()
    try:
        for chunk in chunks:
            now = clock()
            if chunk is not None:
                last = now
                yield b"data: " + dump(chunk) + b"\n\n"
            elif now - last >= PING_SECONDS:
                last = now
                yield PING
    except TorchchatError as error:
        yield b"data: " + error_body(error) + b"\n\n"
    else:
        yield DONE


def ndjson(chunks: Iterable[object | None]) -> Iterator[bytes]:
    """One chunk per line; the end of the stream is the end of the answer. NDJSON has no comments, so no pings."""
    try:
        for chunk in chunks:
            if chunk is not None:
                yield dump(chunk) + b"\n"
    except TorchchatError as error:
        yield error_body(error) + b"\n"
