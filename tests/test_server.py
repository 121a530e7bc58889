"""The app and waitress, with a scripted engine; real clients on a real port."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from flask.testing import FlaskClient

import server
from errors import EngineError, SetupError
from tests.api.fakes import MODEL, FakeService, endless, failing, serving

ROOT = Path(__file__).parents[1]
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES}


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def client(service: FakeService) -> FlaskClient:
    return server.create_app(service).test_client()


@pytest.fixture
def port(service: FakeService) -> Iterator[int]:
    with serving(service) as number:
        yield number


def error_of(response: Any) -> dict[str, Any]:
    """The error of a reply, once it is sure that it has the wire's form."""
    assert response.content_type == "application/json"
    error: dict[str, Any] = response.get_json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def events(body: str) -> list[Any]:
    """The data of a stream, [DONE] included."""
    frames = body.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame[6:]) if frame != "data: [DONE]" else "[DONE]" for frame in frames]


# --- routes


@pytest.mark.parametrize("path", ["/chat", "/v1/chat", "/chat/", "/v1/chat/completions", "/chat/completions"])
def test_chat_routes_are_one(client: FlaskClient, path: str) -> None:
    whole = client.post(path, json=CHAT)
    assert whole.status_code == 200
    assert whole.content_type == "application/json"
    assert whole.get_json()["choices"][0]["message"]["content"] == "Once upon a time."
    streamed = client.post(path, json={**CHAT, "stream": True})
    assert events(streamed.text)[1]["choices"][0]["delta"] == {"content": "O"}


def test_streaming_headers(client: FlaskClient) -> None:
    response = client.post("/chat", json={**CHAT, "stream": True})
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert "Content-Length" not in response.headers


def test_stream_and_whole_say_the_same(client: FlaskClient, service: FakeService) -> None:
    service.engine.script = lambda r: f"né{r.choice} \U0001f600 STOP x".encode()
    ask = {**CHAT, "n": 3, "stop": ["STOP"], "logprobs": True, "top_logprobs": 2}
    whole = client.post("/chat", json=ask).get_json()
    *chunks, usage, done = events(
        client.post("/chat", json={**ask, "stream": True, "stream_options": {"include_usage": True}}).text
    )
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == len(service.engine.seen[0].prompt)
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == choice["message"]["content"] == f"né{choice['index']} \U0001f600 "
        assert (
            [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]] == ["stop"]
        )
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert bytes(b for entry in entries for b in entry["bytes"]).decode() == text


def test_ascii_text_arrives_token_by_token(client: FlaskClient) -> None:
    chunks = events(client.post("/chat", json={**CHAT, "stream": True}).text)
    assert len(chunks) == len("Once upon a time.") + 3  # role, finish, [DONE]
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_a_character_cut_by_max_tokens(client: FlaskClient, service: FakeService) -> None:
    service.engine.script = lambda r: "aé".encode()
    whole = client.post("/chat", json={**CHAT, "max_tokens": 2}).get_json()["choices"][0]
    chunks = events(client.post("/chat", json={**CHAT, "max_tokens": 2, "stream": True}).text)[:-1]
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["message"]["content"]


def test_an_immediate_end(client: FlaskClient, service: FakeService) -> None:
    service.engine.script = lambda r: b""
    whole = client.post("/chat", json=CHAT).get_json()
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["usage"]["completion_tokens"] == 1
    deltas = [c["choices"][0]["delta"] for c in events(client.post("/chat", json={**CHAT, "stream": True}).text)[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {}]


def test_lines_when_the_client_accepts_them(client: FlaskClient) -> None:
    headers = {"Accept": "application/x-ndjson"}
    response = client.post("/chat", json={**CHAT, "stream": True}, headers=headers)
    assert response.content_type == "application/x-ndjson; charset=utf-8"
    *_, last = [json.loads(line) for line in response.text.splitlines()]
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", ["/completions", "/v1/completions"])
def test_completions(client: FlaskClient, path: str) -> None:
    whole = client.post(path, json={"prompt": "Hi", "logprobs": 1}).get_json()
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["finish_reason"] == "length"  # 16 tokens
    *chunks, done = events(client.post(path, json={"prompt": "Hi", "stream": "true"}).text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_models(client: FlaskClient, prefix: str) -> None:
    listed = client.get(f"{prefix}/models").get_json()
    assert listed["object"] == "list"
    assert listed["data"] == [client.get(f"{prefix}/models/{MODEL}").get_json()]
    assert listed["data"][0] == {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "torchchat",
        "max_model_len": 1024,
    }
    missing = client.get(f"{prefix}/models/{MODEL.lower()}")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


def test_health_and_engine(client: FlaskClient, service: FakeService) -> None:
    assert client.get("/health").get_json() == {"status": "ok"}
    service.engine.alive = False
    assert client.get("/health").status_code == 503
    assert client.post("/chat", json=CHAT).status_code == 503


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("POST", "/chat"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/models/x")],
)
def test_not_ready(client: FlaskClient, service: FakeService, state: Any, method: str, path: str) -> None:
    service.state = state
    response = client.open(path, method=method, data=b"not even JSON")
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) >= 1
    error_of(response)


def test_metrics(client: FlaskClient, service: FakeService) -> None:
    client.post("/chat", json=CHAT).close()
    text = client.get("/metrics").text
    for line in (
        "torchchat_requests_running 0.0",
        "torchchat_requests_waiting 0.0",
        "torchchat_rows 4.0",
        'torchchat_requests_total{finish_reason="stop"} 1.0',
        "torchchat_prompt_tokens_total 11.0",
        "torchchat_cached_tokens_total 7.0",
        "torchchat_generation_tokens_total 5.0",
        "torchchat_engine_up 1.0",
        "torchchat_time_to_first_token_seconds_count 1.0",
        "torchchat_inter_token_seconds_count 17.0",
        "torchchat_request_seconds_count 1.0",
        f'torchchat_build_info{{device="cpu",dtype="float32",model="{MODEL}",quantize="none",version="0"}} 1.0',
    ):
        assert line in text.splitlines(), line
    service.state = "loading"
    assert "torchchat_engine_up 0.0" in client.get("/metrics").text.splitlines()


def test_two_apps_have_their_own_metrics(client: FlaskClient) -> None:
    other = server.create_app(FakeService()).test_client()
    other.post("/chat", json=CHAT).close()
    assert "torchchat_request_seconds_count 0.0" in client.get("/metrics").text.splitlines()


# --- errors


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/nothing/<b>", 404),
        ("GET", "/chat", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_routes_that_are_not(client: FlaskClient, method: str, path: str, status: int) -> None:
    response = client.open(path, method=method)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/chat", "/v1/models", "/health"])
def test_options_name_the_methods_and_are_no_html(client: FlaskClient, path: str) -> None:
    response = client.options(path)
    assert (response.status_code, response.data, response.content_type) == (200, b"", "application/json")
    assert "OPTIONS" in response.headers["Allow"]


@pytest.mark.parametrize("body", [b"", b"{", b"stream=true", b'{"messages": "\\ud83d"}', b"\xff\xfe"])
def test_bad_json(client: FlaskClient, body: bytes) -> None:
    response = client.post("/v1/chat/completions", data=body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/json"])
def test_the_content_type_does_not_matter(client: FlaskClient, content_type: str | None) -> None:
    response = client.post("/chat", data=json.dumps(CHAT), content_type=content_type)
    assert response.status_code == 200


def test_a_compressed_body_is_415(client: FlaskClient) -> None:
    response = client.post("/chat", data=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert response.status_code == 415
    error_of(response)


def test_a_large_body_is_413(client: FlaskClient) -> None:
    response = client.post("/chat", data=b" " * (server.MAX_BODY + 1))
    assert response.status_code == 413
    error_of(response)


@pytest.mark.parametrize("stream", [True, False])
def test_the_status_is_decided_before_the_first_byte(client: FlaskClient, service: FakeService, stream: bool) -> None:
    ask = {**CHAT, "stream": stream}
    long = client.post("/chat", json={**ask, "messages": [{"role": "user", "content": "x" * 2000}]})
    assert (long.status_code, error_of(long)["code"]) == (400, "context_length_exceeded")
    wrong = client.post("/chat", json={**ask, "temperature": 9})
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "temperature")
    service.engine.full = True
    full = client.post("/chat", json=ask)
    assert (full.status_code, error_of(full)["code"]) == (429, "rate_limit_exceeded")
    assert "Retry-After" in full.headers


def test_a_failing_engine(client: FlaskClient, service: FakeService) -> None:
    service.engine.script = failing(b"ab", EngineError("step failed"))
    whole = client.post("/chat", json=CHAT)
    assert whole.status_code == 500
    assert error_of(whole) == {"message": "step failed", "type": "server_error", "param": None, "code": None}
    with client.post("/chat", json={**CHAT, "stream": True}) as streamed:
        *chunks, last = events(streamed.text)
    assert last["error"] == error_of(whole)
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert service.engine.running == 0


def test_a_bug_is_a_500_with_its_trace_in_the_log_only(
    client: FlaskClient, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    def script(request: Any) -> Iterator[int]:
        yield 97
        raise KeyError("secret")

    service.engine.script = script
    whole = client.post("/chat", json=CHAT, headers={"x-request-id": "abc"})
    assert whole.status_code == 500
    assert "secret" not in whole.text and "abc" in error_of(whole)["message"]
    assert "secret" in caplog.text
    with client.post("/chat", json={**CHAT, "stream": True}) as streamed:
        last = events(streamed.text)[-1]
    assert last["error"]["type"] == "server_error"
    assert service.engine.running == 0


@pytest.mark.parametrize("given", ["abc-123", "a" * 128, "550e8400-e29b-41d4-a716-446655440000"])
def test_a_harmless_request_id_is_echoed(client: FlaskClient, given: str) -> None:
    for path in ("/health", "/nothing"):
        assert client.get(path, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "é", "<script>", "a\tb"])
def test_any_other_is_replaced(client: FlaskClient, given: str) -> None:
    replies = [client.post("/chat", json={**CHAT, "stream": s}, headers={"x-request-id": given}) for s in (True, False)]
    made = {reply.headers["x-request-id"] for reply in replies}
    assert len(made) == 2
    assert all(re.fullmatch(r"req_[0-9a-f]{32}", each) for each in made)


def test_one_log_line_per_request(client: FlaskClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchchat.access")
    with client.post("/v1/chat", json={**CHAT, "stream": True}, headers={"x-request-id": "r1"}) as streamed:
        assert streamed.text
    client.get("/no%0Asuch").close()
    client.get(f"/v1/models/{'long' * 5000}").close()
    first, second, third = [record.getMessage() for record in caplog.records if record.name == "torchchat.access"]
    assert re.fullmatch(
        r"id=r1 route=POST:/v1/chat status=200 prompt=9 cached=0 completion=18 ttft=\d\.\d{3}s tokens/s=[\d.]+", first
    )
    assert "route=GET:/no%0Asuch status=404" in second
    assert "longlong" in third and len(third) < 500


# --- the OpenAI SDK


@pytest.fixture
def sdk(port: int) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0, _strict_response_validation=True) as made:
        yield made


def test_sdk_whole(sdk: openai.OpenAI) -> None:
    made = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=1, n=2)
    assert [choice.message.content for choice in made.choices] == ["Once upon a time."] * 2
    assert made.usage is not None and made.usage.completion_tokens == 36
    assert made.choices[0].logprobs is not None and made.choices[0].logprobs.content is not None
    assert made.choices[0].logprobs.content[0].top_logprobs[0].token == "O"
    assert made._request_id is not None


def test_sdk_raw_stream(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Once upon a time."
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 27


def test_sdk_stream_helper(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model=MODEL, messages=MESSAGES, n=2) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "chunk"} <= kinds
    assert [choice.message.content for choice in final.choices] == ["Once upon a time."] * 2
    assert final.choices[0].message.role == "assistant"


def test_sdk_async(port: int) -> None:
    async def ask() -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as made:
            whole = await made.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = await made.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return whole.choices[0].message.content, text

    assert asyncio.run(ask()) == ("Once upon a time.", "Once upon a time.")


def test_sdk_completions_and_models(port: int, sdk: openai.OpenAI) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as lenient:
        made = lenient.completions.create(model=MODEL, prompt="Hi", echo=True, logprobs=1, max_tokens=4)
        text = "".join(c.choices[0].text for c in lenient.completions.create(model=MODEL, prompt="Hi", stream=True))
    assert made.choices[0].text == "HiOnce"
    assert text == "Once upon a time"
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).id == MODEL


def test_sdk_errors(sdk: openai.OpenAI, service: FakeService) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.models.retrieve("other")
    assert missing.value.code == "model_not_found"
    service.engine.script = failing(b"ab")
    with pytest.raises(openai.APIError, match="step failed"):
        list(sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
    with pytest.raises(openai.InternalServerError, match="step failed"):
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    service.state = "loading"
    with pytest.raises(openai.InternalServerError) as loading:
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert loading.value.status_code == 503


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("stream", ["true", "false"])
def test_the_curl_lines_people_copy(port: int, stream: str) -> None:
    body = json.dumps(
        {
            "model": "stories15M",
            "stream": stream,
            "messages": [
                {"role": "system", "content": "You are a storyteller."},
                {"role": "user", "content": "Story about a dog."},
            ],
        }
    )
    url = f"http://127.0.0.1:{port}/chat"
    done = subprocess.run(
        ["curl", "-sS", "-N", url, "-d", body], capture_output=True, text=True, check=True, timeout=30
    )
    if stream == "true":
        *chunks, last = events(done.stdout)
        assert last == "[DONE]"
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Once upon a time."
    else:
        assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "Once upon a time."


# --- sockets


def post(port: int, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a chat request."""
    data = json.dumps(body).encode()
    link = socket.create_connection(("127.0.0.1", port), timeout=10)
    link.sendall(b"POST /chat HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
    return link


def read_all(link: socket.socket) -> bytes:
    """What comes until the server closes."""
    return b"".join(iter(lambda: link.recv(65536), b""))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(port: int, service: FakeService, stream: bool) -> None:
    service.engine.script, service.engine.pace = endless, 0.005
    with post(port, {**CHAT, "stream": stream}) as link:
        assert service.engine.wait_running(1)
        if stream:
            assert link.recv(100).startswith(b"HTTP/1.1 200 OK")
    assert service.engine.wait_running(0, 1.0)


@pytest.mark.parametrize("stream", [True, False])
def test_also_while_nothing_comes(port: int, service: FakeService, stream: bool) -> None:
    """In the queue, or during a long prefill, there are only ticks."""

    def silent(request: Any) -> Iterator[None]:
        while not service.engine.closed.wait(0.02):
            yield None

    service.engine.script = silent
    with post(port, {**CHAT, "stream": stream}):
        assert service.engine.wait_running(1)
    assert service.engine.wait_running(0, 1.0)


def test_each_event_is_sent_at_once(port: int, service: FakeService) -> None:
    more = threading.Event()

    def script(request: Any) -> Iterator[int | None]:
        yield ord("a")
        while not more.wait(0.02):
            yield None
        yield ord("b")

    service.engine.script = script
    with post(port, {**CHAT, "stream": True}) as link:
        seen = b""
        while b'{"content":"a"}' not in seen:
            seen += link.recv(65536)
        assert not more.is_set()
        more.set()
        assert b"[DONE]" in read_all(link)


def test_a_client_that_stops_reading_stalls_nobody(port: int, service: FakeService) -> None:
    service.engine.script = endless
    with post(port, {**CHAT, "stream": True, "max_tokens": 20_000}):
        assert service.engine.wait_running(1)
        service.engine.script = lambda r: b"quick"
        with post(port, {**CHAT, "stream": True}) as other:
            assert b"[DONE]" in read_all(other)


def test_connections_are_kept_for_whole_answers(port: int) -> None:
    data = json.dumps(CHAT).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        for _ in range(2):
            link.sendall(b"POST /chat HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
            reply = b""
            while b"system_fingerprint" not in reply:
                reply += link.recv(65536)
            assert reply.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /chat HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"POST /chat HTTP/1.1\r\nHost: x\r\nContent-Length: one\r\n\r\n", b"400"),
        (b"POST /chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", b"400"),
        (b"POST /chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
        ((b"GET / HTTP/1.1\r\nX: " + b"x" * 2**18)[: 2**18], b"431"),
    ],
)
def test_what_waitress_refuses_is_json_too(port: int, sent: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        link.sendall(sent)
        head, _, body = read_all(link).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    assert b"x-request-id" in head.lower()
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_many_idle_connections_lock_nobody_out(port: int) -> None:
    links = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(300)]
    try:
        with post(port, {**CHAT, "stream": True}) as link:
            assert b"[DONE]" in read_all(link)
    finally:
        for each in links:
            each.close()


def test_a_port_in_use(service: FakeService, port: int) -> None:
    with pytest.raises(SetupError, match="--port") as caught:
        server.run(service, port=port)
    assert "\n" not in caught.value.message
    with pytest.raises(SetupError, match="--host"):
        server.run(service, host="no.such.host.invalid", port=0)


# --- signals


class Process:
    """The fake service in a process of its own."""

    def __init__(self, behaviour: str, grace: float) -> None:
        command = [sys.executable, "-m", "tests.api.fakes", behaviour, str(grace)]
        self.running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []

    def port(self) -> int:
        assert self.running.stderr is not None
        for line in self.running.stderr:
            self.lines.append(line)
            found = re.search(rf"Serving {MODEL} on http://127\.0\.0\.1:(\d+)$", line.rstrip())
            if found:
                return int(found[1])
        raise AssertionError("".join(self.lines))

    def wait(self) -> int:
        return self.running.wait(timeout=20)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.kill()
        self.running.communicate()


def ask_health(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        link.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        return read_all(link)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_when_idle_ends_with_0_and_frees_the_port(number: signal.Signals) -> None:
    with Process("story", 30) as process:
        port = process.port()
        assert b"200 OK" in ask_health(port)
        process.running.send_signal(number)
        assert process.wait() == 0
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_running_stream_finishes_while_new_requests_get_503() -> None:
    with Process("endless", 30) as process:
        port = process.port()
        with post(port, {**CHAT, "stream": True, "max_tokens": 150}) as link:
            link.recv(10)
            process.running.send_signal(signal.SIGTERM)
            health = ask_health(port)
            while b"200 OK" in health:
                health = ask_health(port)
            assert b"503" in health.split(b"\r\n")[0]
            assert b"Retry-After" in health
            assert read_all(link).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert process.wait() == 0


@pytest.mark.parametrize(("grace", "signals"), [(0.2, 1), (60, 2)])
def test_grace_ends_or_a_second_signal_comes(grace: float, signals: int) -> None:
    with Process("endless", grace) as process:
        with post(process.port(), {**CHAT, "stream": True}) as link:
            link.recv(10)
            process.running.send_signal(signal.SIGTERM)
            if signals == 2:
                assert process.running.stderr is not None
                assert "Shutting down" in process.running.stderr.readline()
                process.running.send_signal(signal.SIGTERM)
            rest = read_all(link)
        assert b'"error":{"message":"The server stopped this request' in rest
        assert b"[DONE]" not in rest and b'"finish_reason":"' not in rest
        assert process.wait() == 0


def test_a_failed_load_ends_with_1_and_one_line() -> None:
    with Process("dead", 1) as process:
        assert process.wait() == 1
        assert process.running.stderr is not None
        lines = process.running.stderr.read().splitlines()
    assert any("weights.gguf: no such file" in line for line in lines)
    assert not any("Traceback" in line for line in lines)
