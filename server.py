"""The HTTP side: a Flask app around a Service, its routes, its one error handler, and waitress to run it."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import flask
import waitress
import waitress.channel
import waitress.task
from flask import Flask, Response, g
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from waitress import wasyncore
from waitress.utilities import InternalServerError
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, UnsupportedMediaType

from api import chat, completions, framing, models, validation
from api.answer import Answer
from api.errors import error_body
from api.loading import Loading
from api.metrics import Metrics
from api.record import Record, internal_error
from api.service import Loaded, Service, require_ready
from api.timing import Timing
from api.types import CompletionRequest, TextCompletionRequest, dump
from errors import EngineError, NotFoundError, RequestError, SetupError, TorchchatError

logger = logging.getLogger("torchchat.server")

MAX_BODY = 32 * 2**20  # bytes: a prompt of a million token ids fits
JSON = "application/json"
NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
Chunk = TypeVar("Chunk")


# --- the app


class _Response(Response):
    """What Flask answers by itself, to OPTIONS."""

    default_mimetype = JSON  # it is empty, and would call itself HTML


def create_app(service: Service) -> Flask:
    """The WSGI app. `service` may still be loading: its routes then answer 503."""
    app = Flask("torchchat", static_folder=None)
    app.response_class = _Response
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False  # redirects are HTML
    app.extensions["service"] = service
    app.extensions["metrics"] = Metrics(service)
    for path, method, view in ROUTES:
        for prefix in ("", "/v1"):
            app.add_url_rule(prefix + path, f"{method} {prefix}{path}", view, methods=[method])
    app.before_request(_begin)
    app.after_request(_end)
    app.register_error_handler(Exception, _failed)
    return app


def _chat() -> Response:
    service = _ready()
    return _send(chat.answer(validation.decode(_body(), CompletionRequest), service))


def _completions() -> Response:
    service = _ready()
    return _send(completions.answer(validation.decode(_body(), TextCompletionRequest), service))


def _models() -> Response:
    return _json(models.list_models(_ready()))


def _model(name: str) -> Response:
    return _json(models.find_model(_ready(), name))


def _health() -> Response:
    """200 when a generation would run, else 503 that says why."""
    require_ready(_service())
    return Response('{"status":"ok"}', content_type=JSON)


def _metrics() -> Response:
    metrics: Metrics = flask.current_app.extensions["metrics"]
    return Response(generate_latest(metrics.registry), content_type=CONTENT_TYPE_LATEST)


ROUTES: tuple[tuple[str, str, Callable[..., Response]], ...] = (
    ("/chat", "POST", _chat),
    ("/chat/completions", "POST", _chat),
    ("/completions", "POST", _completions),
    ("/models", "GET", _models),
    ("/models/<path:name>", "GET", _model),
    ("/health", "GET", _health),
    ("/metrics", "GET", _metrics),
)


def _service() -> Service:
    service: Service = flask.current_app.extensions["service"]
    return service


def _ready() -> Service:
    service = _service()
    require_ready(service)
    return service


def _body() -> bytes:
    """The request's bytes, whatever their content type says: `curl -d` calls JSON a form."""
    encoding = flask.request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMediaType(f"Content-Encoding {encoding!r} is not read; send plain JSON.")
    return flask.request.get_data(cache=False)


def _json(value: object) -> Response:
    return Response(dump(value), content_type=JSON)


def _send(answer: Answer[Chunk]) -> Response:
    """Submit, then stream the chunks or fold them. The stream is closed whatever happens, which frees the rows."""
    record: Record = g.record
    events = answer.start(_service())
    record.timing = timing = Timing(answer.per_prompt, record.metrics.gap.observe, record.started)
    left = flask.request.environ.get("waitress.client_disconnected", lambda: False)
    chunks = answer.chunks(timing.watch(events, left))
    if not answer.stream:
        try:
            return _json(answer.collect(chunks))
        finally:
            events.close()
    told = record.told(chunks)
    lines = NDJSON in flask.request.headers.get("Accept", "")
    response = Response(
        framing.ndjson(told) if lines else framing.sse(told),
        content_type=f"{NDJSON if lines else SSE}; charset=utf-8",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
    response.call_on_close(events.close)
    return response


# --- what happens to every request


def _request_id() -> str:
    """The client's own id if it is a harmless one, else a new one."""
    given = flask.request.headers.get("x-request-id", "")
    return given if re.fullmatch(r"[\w.:/+=@-]{1,128}", given, re.ASCII) else _new_id()


def _new_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def _begin() -> None:
    g.record = Record(_request_id(), flask.current_app.extensions["metrics"])


def _end(response: Response) -> Response:
    request, record = flask.request, g.record
    response.headers["x-request-id"] = record.id
    rule = request.url_rule
    path = quote(request.path[:200]) if rule is None else rule.rule
    response.call_on_close(partial(record.close, f"{request.method}:{path}", response.status_code))
    return response


def _failed(problem: Exception) -> Response:
    """Every error as JSON with the wire's four keys."""
    error = _told(problem)
    g.record.problem = error.message
    response = Response(error_body(error), error.status, content_type=JSON)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    if isinstance(problem, MethodNotAllowed) and problem.valid_methods is not None:
        response.headers["Allow"] = ", ".join(sorted(problem.valid_methods))
    return response


def _told(problem: Exception) -> TorchchatError:
    """Any exception as one of our tree."""
    if isinstance(problem, TorchchatError):
        return problem
    if isinstance(problem, NotFound):
        return NotFoundError(f"There is no {flask.request.method} {flask.request.path} here.")
    if isinstance(problem, HTTPException) and problem.code is not None:
        error = RequestError(problem.description if problem.description is not None else problem.name)
        error.status = problem.code
        return error
    logger.error("Request %s failed", g.record.id, exc_info=problem)
    return internal_error(g.record.id)


# --- waitress


class _ErrorTask(waitress.task.ErrorTask):
    """What waitress itself refuses (a broken or too large request), as JSON like every other error."""

    def execute(self) -> None:
        problem = self.request.error
        ours = isinstance(problem, InternalServerError)  # a 501 too is the client's doing, and SDKs try 5xx again
        error = (EngineError if ours else RequestError)(f"{problem.reason}: {problem.body.rstrip('.')}.")
        body = error_body(error)
        self.status = f"{problem.code if ours or problem.code < 500 else 400} {problem.reason}"
        self.response_headers += [("Content-Type", JSON), ("x-request-id", _new_id())]
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class _Channel(waitress.channel.HTTPChannel):
    error_task_class = _ErrorTask

    def writable(self) -> bool:
        """Not while a thread is sending: the loop would find the socket writable and spin until the thread is done.
        What the thread can't send it reports to the loop itself."""
        if not self.outbuf_lock.acquire(blocking=False):
            return False
        try:
            return bool(super().writable())
        finally:
            self.outbuf_lock.release()


def bind(service: Service, *, host: str, port: int, threads: int) -> Any:
    """A waitress server on an open port, not yet running; its `effective_port` is the real one.

    One thread per request in flight or waiting, so `threads` should be rows + queue + some for health and metrics.
    Raises SetupError if the port can't be had.
    """
    server = waitress.create_server(
        create_app(service),
        map={},
        sockets=[_listener(host, port)],
        threads=threads,
        connection_limit=4000,  # the default 100 lets half-open sockets lock everyone out
        asyncore_use_poll=True,
        channel_request_lookahead=8,  # keep reading during a request: that is how a client is seen to leave
        max_request_body_size=MAX_BODY + 1,
        log_socket_errors=False,
        clear_untrusted_proxy_headers=True,
        ident="torchchat",
    )
    server.channel_class = _Channel
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    return server


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise SetupError(f"Port {port} is in use on {host}; choose another one with --port.") from None
        raise SetupError(f"Can't listen on {host} port {port} (--host, --port): {error}.") from None


def serve(
    model_id: str,
    load: Callable[[], Loaded],
    *,
    host: str,
    port: int,
    grace: float,
    threads: int,
    strict_model: bool,
) -> int:
    """The server command once its options are read: `run`, with the log on stderr, for what `load` gives."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("torchchat").setLevel(logging.INFO)
    service = Loading(model_id, load, strict_model=strict_model)
    code = run(service, host=host, port=port, grace=grace, threads=threads, on_open=service.start)
    if service.is_loading():  # amid torch, where a thread can't be stopped, and aborts when Python ends around it
        logging.shutdown()
        os._exit(code)
    return code


def run(
    service: Service,
    *,
    host: str = "127.0.0.1",
    port: int = 5000,
    grace: float = 30.0,
    threads: int = 128,
    on_open: Callable[[], None] = lambda: None,
) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. Call it in the main thread.

    The port opens at once, and `on_open` is called; while `service` loads, requests get 503. The first signal lets
    running answers finish for up to `grace` seconds, the second ends them at once. A failed load ends it with 1.
    Raises SetupError if the port can't be had.
    """
    server = bind(service, host=host, port=port, threads=threads)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{server.effective_port}"
    with _signals() as received:
        try:
            logger.info("Listening on %s while %s loads", url, service.model_id)
            on_open()
            return _loop(server, service, received, url=url, grace=grace)
        finally:
            service.close()
            _turn(server, until=time.monotonic() + 2.0)  # the last events of what was cut off
            server.task_dispatcher.shutdown(timeout=1)
            wasyncore.close_all(server._map)


def _loop(server: Any, service: Service, received: list[int], *, url: str, grace: float) -> int:
    announced, deadline = False, None
    while True:
        wasyncore.loop(timeout=0.1, use_poll=True, map=server._map, count=1)
        if not announced and service.state == "dead":
            logger.error("%s", service.problem)
            return 1
        if not announced and service.state == "ready":
            announced = True
            logger.info("Serving %s on %s", service.model_id, url)
        if received and deadline is None:
            logger.info("Shutting down; running answers have %g s to finish", grace)
            service.drain()
            deadline = time.monotonic() + grace
        if deadline is not None and (len(received) > 1 or not _busy(server) or time.monotonic() >= deadline):
            return 0


def _turn(server: Any, *, until: float) -> None:
    """Keep sending until nothing is left to send."""
    while _busy(server) and time.monotonic() < until:
        wasyncore.loop(timeout=0.05, use_poll=True, map=server._map, count=1)


def _busy(server: Any) -> bool:
    """Whether any connection has a request running or bytes to send."""
    return any(channel.requests or channel.total_outbufs_len for channel in list(server.active_channels.values()))


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM. After the second one they mean what they always do, should closing hang."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def receive(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            for each in before:
                signal.signal(each, signal.SIG_DFL)

    try:
        for number in before:
            signal.signal(number, receive)
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
