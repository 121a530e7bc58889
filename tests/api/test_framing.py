from __future__ import annotations

import json
from collections.abc import Iterator

from api import framing
from api.types import ChunkDelta
from errors import EngineError

DELTA = ChunkDelta(content="a")
LINE = b'{"content":"a"}'


def broken() -> Iterator[ChunkDelta]:
    yield DELTA
    raise EngineError("step\nfailed \ud83d")


def test_events_then_done() -> None:
    assert list(framing.sse([DELTA, None, DELTA])) == [b"data: " + LINE + b"\n\n"] * 2 + [b"data: [DONE]\n\n"]


def test_an_error_ends_the_stream() -> None:
    first, last = framing.sse(broken())
    assert first == b"data: " + LINE + b"\n\n"
    assert last.startswith(b"data: ") and last.endswith(b"\n\n") and last.count(b"\n") == 2
    assert json.loads(last[6:]) == {
        "error": {"message": "step\nfailed \ud83d", "type": "server_error", "param": None, "code": None}
    }


def test_ten_seconds_of_silence_are_broken_by_a_comment() -> None:
    times = iter([0.0, 5.0, 9.9, 10.0, 15.0, 16.0, 25.0, 26.0])
    frames = list(framing.sse([None, None, None, None, DELTA, None, None], clock=lambda: next(times)))
    assert frames == [b": ping\n\n", b"data: " + LINE + b"\n\n", b": ping\n\n", b"data: [DONE]\n\n"]


def test_lines() -> None:
    assert list(framing.ndjson([DELTA, None, DELTA])) == [LINE + b"\n"] * 2
    first, last = framing.ndjson(broken())
    assert first == LINE + b"\n"
    assert json.loads(last)["error"]["type"] == "server_error"
