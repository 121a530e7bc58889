"""`chat`: a conversation in the terminal, piped and on a real (pseudo) terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import generate
import terminal
from engine.types import LoadOptions, SamplingParams
from errors import EngineError, UnavailableError
from generate import Service
from terminal import Conversation
from tests import speakers

ROOT = Path(__file__).parents[1]
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speakers.write_chat_model(tmp_path_factory.mktemp("chat") / "talker")


@pytest.fixture(scope="module")
def service(chat_model: Path) -> Iterator[Service]:
    loaded = generate.load(LoadOptions("talker", max_seq_length=256, max_batch=2), chat_model, SamplingParams())
    yield loaded
    loaded.close()


@pytest.fixture
def conversation(service: Service) -> Conversation:
    return Conversation(service, terminal._settle(service, SHORT))


@pytest.fixture
def say(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Pipe lines into a chat; what came to stdout and stderr."""

    def run(*lines: str, system: str | None = None, stop: tuple[str, ...] = ()) -> tuple[str, str]:
        data = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        terminal.chat(service, SHORT, system=system, stop=stop)
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


def test_a_piped_conversation(say: Callable[..., tuple[str, str]], conversation: Conversation, capsys: Any) -> None:
    for line in ("Hi", "Go on"):
        conversation.take(line)
    expected = capsys.readouterr().out
    assert [role for role, _ in said(conversation)] == ["user", "assistant", "user", "assistant"]
    out, err = say("Hi", "", "Go on", "/bye", "not read")
    assert out == expected  # answers and nothing else
    lines = err.splitlines()
    assert re.fullmatch(r"talker, loaded in \d+\.\d s\. /help shows the commands, /bye ends\.", lines[0])
    assert len(lines) == 3
    for line in lines[1:]:
        assert re.fullmatch(r"\[first token .*, prompt \d+ tokens \(\d+ cached\), answer 6 tokens\]", line)
    assert say("Hi")[0] == say("Hi", "/exit")[0]  # the end of the input ends it too


def test_each_turn_prefills_only_what_is_new(conversation: Conversation) -> None:
    conversation.take("Tell me a story about a little dog that lives in a house with a cat.")
    first = conversation.usage
    conversation.take("Go on")
    second = conversation.usage
    assert first is not None and second is not None
    assert first.prompt > 40
    assert second.cached >= first.prompt - 2  # what follows may be split into tokens otherwise than it was made
    assert second.prompt > second.cached


def test_the_whole_conversation_is_what_the_model_reads(conversation: Conversation, service: Service) -> None:
    conversation.take("/system Be brief.")
    conversation.take("Hi")
    conversation.take("Go on")
    assert conversation.usage is not None
    before = [{"role": role, "content": text} for role, text in said(conversation)[:3]]
    prompt = service.dialect.render([{"role": "system", "content": "Be brief."}, *before])
    assert conversation.usage.prompt == len(prompt)


def test_commands(say: Callable[..., tuple[str, str]], conversation: Conversation, capsys: Any) -> None:
    out, err = say("/help", "/system", "/system Be kind.", "/system", "/reset", "/sing la", system="Be brief.")
    assert out == ""
    assert err.splitlines()[1:] == [
        *terminal.HELP.splitlines(),
        "System message: Be brief.",
        "System message: Be kind.",
        "System message: Be kind.",
        "The conversation is forgotten.",
        "error: there is no command /sing; /help shows them.",
    ]
    assert "There is no system message." in say("/system")[1]
    conversation.take("Hi")
    fresh = said(conversation)
    conversation.take("/reset")
    assert said(conversation) == []
    conversation.take("Hi")
    assert said(conversation) == fresh  # nothing of it was left
    conversation.take("/etc/passwd is a file")  # no command
    assert said(conversation)[2] == ("user", "/etc/passwd is a file")


def test_stop_strings(say: Callable[..., tuple[str, str]]) -> None:
    whole = say("Hi")[0].removesuffix("\n")
    character = whole[-1]
    assert say("Hi", stop=(character,))[0].removesuffix("\n") == whole[: whole.index(character)]


def test_an_error_of_one_turn_is_one_line_and_the_talk_goes_on(
    say: Callable[..., tuple[str, str]], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = say("Hi")[0]
    out, err = say("no text: \udcff", "Hi")
    assert out == alone
    assert re.fullmatch(r"error: .*", err.splitlines()[1])

    forward, broken = service.engine.runner.forward, [True]

    def fail_once(*args: Any) -> Any:
        if broken and broken.pop():
            raise EngineError("out of memory")
        return forward(*args)

    monkeypatch.setattr(service.engine.runner, "forward", fail_once)
    out, err = say("lost", "Hi")
    assert out == alone
    assert err.splitlines()[1] == "error: out of memory"


def test_a_full_context_says_so_and_the_conversation_survives(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Conversation(service, terminal._settle(service, SamplingParams(temperature=0.0, ignore_eos=True)))
    long.take("Hi")  # writes until the context is full
    assert "The context of 256 tokens is full: /reset begins a new conversation." in capsys.readouterr().err
    before = said(long)
    assert len(before) == 2
    data = b"Hi\nGo on\n/reset\nHi\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    terminal.chat(service, long.params, system=None, stop=())
    out, err = capsys.readouterr()
    assert re.search(
        r"^error: with this message the conversation has \d+ tokens, .* context of 256\. .*/reset", err, re.M
    )
    assert out == f"{before[1][1]}\n" * 2


def test_ctrl_c_keeps_what_was_said(conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    conversation.params = terminal._settle(conversation.service, SamplingParams(temperature=0.0, ignore_eos=True))
    write = terminal._write

    def press(text: str) -> None:
        write(text)
        if text and not pressed:
            pressed.append(text)
            os.kill(os.getpid(), signal.SIGINT)

    pressed: list[str] = []
    monkeypatch.setattr(terminal, "_write", press)
    conversation.take("Hi")
    assert said(conversation) == [("user", "Hi"), ("assistant", pressed[0])]
    captured = capsys.readouterr()
    assert captured.out == pressed[0] + "\n"
    assert captured.err.startswith("[stopped, first token")
    conversation.params = terminal._settle(conversation.service, SHORT)
    conversation.take("Go on")
    assert len(said(conversation)) == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_first_token_takes_the_message_back(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = conversation.service.engine.runner.forward

    def press(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return forward(*args)

    conversation.params = terminal._settle(
        conversation.service, SamplingParams(logit_bias={speakers.START: 100.0}, ignore_eos=True)
    )  # no text at all
    monkeypatch.setattr(conversation.service.engine.runner, "forward", press)
    conversation.take("Hi")
    assert said(conversation) == []


def test_a_dead_engine_ends_the_program(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = generate.load(LoadOptions("talker", max_batch=1), chat_model, SamplingParams())
    dead.close()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi\nHi\n")))
    with pytest.raises(UnavailableError):
        terminal.chat(dead, SHORT, system=None, stop=())


# On a terminal


class Screen:
    """A process whose input and output are a pseudo terminal of its own."""

    def __init__(self, *command: str) -> None:
        ours, theirs = pty.openpty()
        attach = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", attach, sys.executable, *command],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=environment,
        )
        os.close(theirs)
        self._terminal = ours

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def until(self, pattern: str, seconds: float = 90) -> str:
        """What is shown up to the first match of `pattern`; fails when it doesn't come in time."""
        shown, deadline = "", time.monotonic() + seconds
        while re.search(pattern, shown) is None:
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} after {shown!r}"
            shown += os.read(self._terminal, 1).decode("latin-1")
        return shown

    def end(self) -> int:
        """The exit status, once everything shown was read."""
        deadline = time.monotonic() + 60
        try:
            while select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if not os.read(self._terminal, 4096):
                    break
        except OSError:  # how Linux says that the other side is closed
            pass
        return self.process.wait(timeout=60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def screen(chat_model: Path) -> Iterator[Screen]:
    opened = Screen("torchchat.py", "chat", str(chat_model), "--ignore-eos")
    yield opened
    opened.close()


def test_ctrl_c_on_a_terminal(screen: Screen) -> None:
    screen.until(r"/bye ends\.\r\n> ")
    screen.type("hello dog\r")
    screen.until(r"hello dog\r\n(.|\n){40}")  # an answer that would go on for thousands of tokens
    screen.type("\x03")
    screen.until(r"\[stopped, first token [^\]]*\]\r\n> ")
    screen.type("half a line")
    screen.until("half a line")
    screen.type("\x03")
    screen.until(r"\n> ")  # Ctrl-C takes the line back and the program goes on
    screen.type("\x10\r")  # Ctrl-P, the line before: what was said last
    screen.until(r"hello dog\r\n(.|\n){40}")
    screen.type("\x03")
    screen.until(r"\[stopped, .*\]\r\n> ")
    screen.type("\x03")  # on an empty line
    assert screen.end() == 0


def test_ctrl_d_ends_it(screen: Screen) -> None:
    screen.until(r"> ")
    screen.type("/help\r")
    screen.until(r"Ctrl-C stops an answer[^>]*> ")
    screen.type("\x04")
    assert screen.end() == 0
