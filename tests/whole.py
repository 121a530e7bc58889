"""The whole product in one process: a tiny model on disk, loaded and served as the server command does it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import requests

import generate
from api.loading import Loading
from engine.types import LoadOptions, SamplingParams
from tests.api.fakes import serving

MODEL = "tiny"
ROWS, QUEUE = 8, 8


@dataclass(frozen=True)
class Served:
    """A running server, what is behind it, and clients for it."""

    port: int
    service: Loading
    session: requests.Session

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def behind(self) -> generate.Service:
        """The model itself."""
        loaded = self.service.loaded
        assert isinstance(loaded, generate.Service)
        return loaded

    def sdk(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def ask(self, content: str = "Hi there", **fields: Any) -> dict[str, Any]:
        """A whole chat answer."""
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.post("/chat", body)

    def get(self, route: str) -> requests.Response:
        return self.session.get(self.url + route, timeout=30)

    def send(self, route: str, body: dict[str, Any] | bytes, *, stream: bool = False) -> requests.Response:
        """The reply to a POST, read to its end unless `stream`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.session.post(self.url + route, data=data, stream=stream, timeout=30)

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of a POST that succeeds."""
        reply = self.send(route, body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def text(self, content: str = "Hi there", **fields: Any) -> str:
        """The text of a whole chat answer; greedy, 24 tokens and blind to end tokens unless `fields` say otherwise."""
        fields = {"temperature": 0, "max_tokens": 24, "ignore_eos": True} | fields
        return str(self.ask(content, **fields)["choices"][0]["message"]["content"])

    def leave(self, body: dict[str, Any], when: Callable[[], object], route: str = "/chat") -> None:
        """Send a request and close the connection once `when` has returned."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as link:
            content = json.dumps(body).encode()
            head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            link.sendall(head.encode() + content)
            when()

    def wait(self, *, running: int, waiting: int = 0, seconds: float = 5.0) -> None:
        """Until exactly so many requests run and wait."""

        def now() -> tuple[int, int]:
            stats = self.behind.engine.stats()
            return stats.running, stats.waiting

        until(lambda: now() == (running, waiting), seconds, lambda: f"running, waiting: {now()}")


def until(true: Callable[[], bool], seconds: float = 5.0, tell: Callable[[], object] = lambda: "too late") -> None:
    """Return as soon as `true()`; fail after `seconds`."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while not true():
        assert time.monotonic() < end, tell()
        pause.wait(0.005)


@contextmanager
def serve(
    path: Path, flags: SamplingParams | None = None, *, strict_model: bool = False, **options: Any
) -> Iterator[Served]:
    """The server command, but for the command line and the process."""
    given = LoadOptions(MODEL, **{"max_batch": ROWS, "max_queue": QUEUE} | options)
    service = Loading(
        MODEL,
        lambda: generate.load(given, path, SamplingParams() if flags is None else flags),
        strict_model=strict_model,
    )
    service.start()
    assert given.max_batch is not None
    with serving(service, threads=given.max_batch + given.max_queue + 8) as port:
        until(lambda: service.state != "loading", 60)
        assert service.state == "ready", service.problem
        with requests.Session() as session:
            yield Served(port, service, session)
