"""The server command in a process of its own: what it logs, how it ends, and the real model's words."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests import speakers
from tests.whole import until

ROOT = Path(__file__).parents[1]
BODY = {
    "model": "stories15M",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Story about a dog."},
    ],
}


class Command:
    """`python torchchat.py server ...`; its log is read as far as asked."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "torchchat.py", "server", *args]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []

    def line(self, pattern: str) -> re.Match[str]:
        """The next line of the log in which `pattern` is found."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = re.search(pattern, self.lines[-1])
            if found is not None:
                return found
        raise AssertionError("\n".join(self.lines))

    def end(self, number: signal.Signals | None = None) -> int:
        """The exit code, after a signal if one is given. The rest of the log is in `lines`, stdout is empty."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        assert out == ""
        self.lines += err.splitlines()
        return self.process.returncode


@contextlib.contextmanager
def running(*args: str) -> Iterator[Command]:
    command = Command(*args)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speakers.write_chat_model(tmp_path_factory.mktemp("command") / "tiny")


def test_from_start_to_end(model: Path) -> None:
    """The port opens while the model loads, one log line tells of each request, HTTP may use every core."""
    with running(str(model), "--port", "0", "--max-new-tokens", "7", "--ignore-eos") as command:
        url = command.line(r"INFO Listening on (http://127\.0\.0\.1:\d+) while tiny loads$")[1]
        early = requests.get(f"{url}/health", timeout=30)
        if early.status_code == 503:
            assert early.headers["Retry-After"]
        assert command.line(r"INFO Serving tiny on (http://127\.0\.0\.1:\d+)$")[1] == url
        assert requests.get(f"{url}/health", timeout=30).status_code == 200
        for _ in range(2):
            reply = requests.post(f"{url}/chat", json=BODY, headers={"x-request-id": "mine"}, timeout=30)
            usage = reply.json()["usage"]
            assert usage["completion_tokens"] == 7
            prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
            told = rf"id=mine route=POST:/chat status=200 prompt={prompt} cached={cached} completion=7"
            command.line(rf"INFO {told} ttft=\d+\.\d{{3}}s tokens/s=\d+\.\d$")
        assert cached == prompt - 1
        if hasattr(os, "sched_getaffinity"):
            allowed = os.sched_getaffinity(0)
            threads = [int(task.name) for task in Path(f"/proc/{command.process.pid}/task").iterdir()]
            free = [thread for thread in threads if os.sched_getaffinity(thread) == allowed]
            assert len(free) > 8 + 64  # the rest is torch's
        assert command.end(signal.SIGTERM) == 0
        assert not any("Traceback" in line for line in command.lines)


def test_a_signal_while_it_loads(model: Path) -> None:
    with running(str(model), "--port", "0") as command:
        command.line("Listening")
        assert command.end(signal.SIGINT) == 0
        assert command.lines[-1].endswith("Shutting down; running answers have 30 s to finish")


def test_a_port_in_use_is_one_line(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(str(model), "--port", str(port)) as command:
            assert command.end() == 1
    assert command.lines == [f"error: Port {port} is in use on 127.0.0.1; choose another one with --port."]


def test_a_broken_model_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    with running(str(path), "--port", "0") as command:
        assert command.end() == 1
    assert "Listening" in command.lines[0]
    assert str(path) in command.lines[1] and "ERROR" in command.lines[1]
    assert len(command.lines) == 2


def test_a_stream_is_finished_after_sigterm_and_cut_by_a_second_one(model: Path) -> None:
    body = {**BODY, "stream": True, "ignore_eos": True, "max_tokens": 500}
    for signals in (1, 2):
        with running(str(model), "--port", "0") as command:
            url = command.line(r"INFO Serving tiny on (\S+)$")[1]
            with requests.post(f"{url}/chat", json=body, stream=True, timeout=60) as stream:
                command.process.send_signal(signal.SIGTERM)
                command.line("Shutting down")
                refused = requests.post(f"{url}/chat", json=BODY, timeout=30)
                assert refused.status_code == 503
                assert refused.headers["Retry-After"]
                if signals == 2:
                    command.process.send_signal(signal.SIGINT)
                text = stream.text
            assert text.endswith("data: [DONE]\n\n") == (signals == 1)
            assert ('"finish_reason":"length"' in text) == (signals == 1)
            assert ("shutting down" in text) == (signals == 2)
            assert command.end() == 0


# --- the real model


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Command]:
    with running(str(smollm2_path), "--port", "0") as command:
        yield command
        command.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def url(smollm2: Command) -> str:
    return smollm2.line(r"INFO Serving \S+ on (\S+)$")[1]


def curl(url: str, stream: str, **more: Any) -> str:
    """The line that torchchat's users paste."""
    body = json.dumps({"stream": stream, **BODY, **more})
    command = ["curl", "-sSN", f"{url}/chat", "-H", "Content-Type: application/json", "-d", body]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def text_of(body: str) -> str:
    """The text of an answer, streamed or not."""
    if not body.startswith("data: "):
        return str(json.loads(body)["choices"][0]["message"]["content"])
    parts = body.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return "".join(json.loads(part[6:])["choices"][0]["delta"].get("content", "") for part in parts[:-2])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_lines_stream_a_story_about_a_dog(url: str) -> None:
    streamed = curl(url, "true", seed=1, max_tokens=40)
    assert streamed.count('"delta":{"content":') > 25  # token by token
    text = text_of(streamed)
    assert text_of(curl(url, "false", seed=1, max_tokens=40)) == text
    greedy = text_of(curl(url, "true", temperature=0, max_tokens=40))
    assert " dog" in greedy
    assert greedy.isascii() and len(greedy.split()) > 20


@pytest.mark.slow
def test_eight_clients_get_exactly_what_they_get_alone(url: str) -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "temperature": 0.5, "stop": ["\n", "."]},
        {"temperature": 0, "frequency_penalty": 1.0},
        {"seed": 3, "top_p": 0.8, "logprobs": True, "top_logprobs": 2},
        {"seed": 4, "top_k": 40, "repetition_penalty": 1.1},
        {"temperature": 0, "logprobs": True},
        {"seed": 5, "n": 1, "min_p": 0.1},
    ]
    topics = ["a dog", "the sea", "two brothers who lost their way", "bread", "Mars", "a king", "rain in May", "a dog"]

    def ask(index: int) -> Any:
        messages = [{"role": "user", "content": f"Tell me about {topics[index]}."}]
        body = {"messages": messages, "max_tokens": 16, **ways[index]}
        reply = requests.post(f"{url}/chat", json=body, timeout=120).json()
        return reply["choices"], reply["usage"]["completion_tokens"]

    alone = [ask(index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


@pytest.mark.slow
def test_leaving_frees_the_row_of_the_real_model(url: str) -> None:
    with requests.post(
        f"{url}/chat", json={**BODY, "stream": True, "ignore_eos": True}, stream=True, timeout=60
    ) as one:
        next(one.iter_content(None))
        assert "torchchat_requests_running 1.0" in requests.get(f"{url}/metrics", timeout=30).text
    until(lambda: "torchchat_requests_running 0.0" in requests.get(f"{url}/metrics", timeout=30).text, 2)


@pytest.mark.slow
def test_sigterm_ends_it_with_0(smollm2: Command, url: str) -> None:
    assert smollm2.end(signal.SIGTERM) == 0
    assert not any("Traceback" in line for line in smollm2.lines)
