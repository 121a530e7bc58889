"""Answers in the terminal: `generate` prints them, `chat` is a conversation.

What the model writes goes to stdout and nothing else does, but for the lines that tell several answers apart;
measurements, errors and advice go to stderr. Both commands submit to the engine and read decode_stream, as the server
does.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine.types import Request, SamplingParams
from errors import ContextLengthError, EngineError, SetupError, TorchchatError, UnavailableError
from models.dialects.decode import TextEvent, TextStream, TokenLogprob, Usage, decode_stream

if TYPE_CHECKING:
    from generate import Service

LOWEST_LOGPROB = -9999.0  # JSON has no -inf
HELP = """\
/system TEXT   tell the model TEXT before the conversation; without TEXT: show what it is told
/reset         forget the conversation, but not the system message
/bye, /exit    end; so do Ctrl-D, and Ctrl-C on an empty line
Ctrl-C stops an answer; what there is of it stays in the conversation."""


class Meter:
    """Times one run from the moment it is made, which is just before its requests are submitted."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._first: tuple[float, Usage] | None = None  # seconds to the first token of all, and that answer's usage
        self._last = 0.0  # seconds to the last
        self._began: dict[int, int] = {}  # tokens of each answer when it was first heard of: these are not decoding
        self.usage: dict[int, Usage] = {}  # by choice

    def note(self, event: TextEvent) -> None:
        self.usage[event.choice] = event.usage
        if event.usage.completion == 0:
            return
        self._began.setdefault(event.choice, event.usage.completion)
        self._last = self._clock() - self._started
        if self._first is None:
            self._first = self._last, event.usage

    def describe(self, per_prompt: int = 1) -> str:
        """Rates and counts. Prefill is that of the first answer to begin; decoding is of all answers together.
        `per_prompt` answers share a prompt, which counts once."""
        parts = []
        if self._first is not None:
            seconds, usage = self._first
            parts.append(f"first token {seconds:.2f} s")
            parts.append(f"prefill {_rate(usage.prompt - usage.cached, seconds)}")
            decoded = sum(self.usage[choice].completion - count for choice, count in self._began.items())
            parts.append(f"decode {_rate(decoded, self._last - seconds)}")
        prompts = [usage for choice, usage in self.usage.items() if choice % per_prompt == 0]
        prompt, cached = sum(usage.prompt for usage in prompts), sum(usage.cached for usage in prompts)
        parts.append(f"prompt {prompt} tokens ({cached} cached)")
        parts.append(f"answer {sum(usage.completion for usage in self.usage.values())} tokens")
        return ", ".join(parts)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if tokens > 0 and seconds > 0 else "-"


# generate


def complete(
    service: Service,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    raw: bool,
    system: str | None,
    stop: Sequence[str],
    num_samples: int,
    as_json: bool,
) -> None:
    """Print `num_samples` answers to each prompt, the first as it is made, and then one line of measurements.

    Chat models get their template, unless `raw`; with `raw` the prompt may spell control tokens. A continuation is
    printed without the prompt, and with the space it begins with, so that prompt + answer is the whole text.
    All answers are made together. `as_json`: an object per line for each of them. Raises TorchchatError.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    params = _settle(service, params)
    inputs = [_encode(service, prompt, raw, system) for prompt in prompts]
    requests = [Request(ids, params, choice) for ids in inputs for choice in range(num_samples)]
    answering = service.dialect.is_chat and not raw
    meter = Meter()
    with closing(_answers(service, requests, stop, answering)) as events:
        ordered = in_order(_noted(events, meter))
        try:
            if as_json:
                _print_json(ordered, [prompt for prompt in prompts for _ in range(num_samples)])
            else:
                _print_texts(ordered, _titles(len(prompts), num_samples))
        except KeyboardInterrupt:
            _tell("")  # the shell goes on in a line of its own
            raise
    compiling = f", compile {service.compile_seconds:.2f} s" if service.options.compile is not None else ""
    loading = f"load {service.load_seconds - service.compile_seconds:.2f} s{compiling}"
    _tell(f"{meter.describe(num_samples)}; {loading}")


def _settle(service: Service, params: SamplingParams) -> SamplingParams:
    """The parameters, completed by the checkpoint's defaults and ours. Raises SetupError for an id that isn't one."""
    params = params.over(service.defaults)
    size = service.engine.vocab_size
    for token_id in params.stop_ids:
        if not 0 <= token_id < size:
            raise SetupError(f"--stop-id {token_id} is no token of this model; they go from 0 to {size - 1}.")
    return replace(params, seed=None if params.seed == -1 else params.seed)


def _encode(service: Service, prompt: str, raw: bool, system: str | None) -> list[int]:
    tokenizer = service.tokenizer
    if not raw:
        return service.dialect.render([*_system(system), {"role": "user", "content": prompt}])
    ids = tokenizer.encode(prompt, bos=tokenizer.add_bos, special=True)
    if not ids and tokenizer.bos_id is not None:  # an empty prompt begins a text
        ids = [tokenizer.bos_id]
    return ids


def _system(text: str | None) -> list[Mapping[str, Any]]:
    return [] if text is None else [{"role": "system", "content": text}]


def _read(service: Service, requests: Sequence[Request], stop: Sequence[str], answering: bool) -> TextStream:
    """Submit. `answering`: the text begins a message, so that a sentencepiece model's first space is none of it."""
    return decode_stream(
        service.engine.submit(requests),
        service.tokenizer,
        stop=stop,
        strip_first_space=answering and service.tokenizer.strips_first_space,
        want_logprobs=requests[0].params.logprobs is not None,
        prompts=[request.prompt for request in requests],
    )


def _answers(
    service: Service, requests: Sequence[Request], stop: Sequence[str], answering: bool
) -> Generator[TextEvent]:
    """The text events of any number of requests: as many at once as the engine takes. Raises what failed one."""
    room = service.engine.rows + service.options.max_queue
    for first in range(0, len(requests), room):
        with closing(_read(service, requests[first : first + room], stop, answering)) as events:
            for event in events:
                if event is not None:
                    _require_success(event)
                    yield replace(event, choice=first + event.choice)


def _require_success(event: TextEvent) -> None:
    if event.finish == "error":
        raise event.error if event.error is not None else EngineError("The engine failed.")
    if event.finish == "cancelled":
        raise UnavailableError("The engine was stopped before the answer was complete.")


def _noted(events: Iterable[TextEvent], meter: Meter) -> Iterator[TextEvent]:
    for event in events:
        meter.note(event)
        yield event


def in_order(events: Iterable[TextEvent]) -> Iterator[TextEvent]:
    """The same events, choice after choice: what a later one says is kept until those before it are complete."""
    kept: defaultdict[int, deque[TextEvent]] = defaultdict(deque)
    current = 0
    for event in events:
        kept[event.choice].append(event)
        while kept[current]:
            ready = kept[current].popleft()
            current += ready.finish is not None
            yield ready


def _titles(prompts: int, samples: int) -> list[str]:
    """The line above each answer; nothing above a single one."""
    titles = []
    for prompt, sample in itertools.product(range(1, prompts + 1), range(1, samples + 1)):
        names = [f"prompt {prompt}"] * (prompts > 1) + [f"sample {sample}"] * (samples > 1)
        titles.append(f"--- {', '.join(names)} ---\n" if names else "")
    return titles


def _print_texts(events: Iterable[TextEvent], titles: Sequence[str]) -> None:
    for choice, parts in itertools.groupby(events, key=lambda event: event.choice):
        _write(("\n" if choice else "") + titles[choice])
        last = ""
        for event in parts:
            _write(event.text)
            last = event.text[-1:] if event.text else last
        _write("" if last == "\n" else "\n")


def _print_json(events: Iterable[TextEvent], prompts: Sequence[str]) -> None:
    for choice, group in itertools.groupby(events, key=lambda event: event.choice):
        parts = list(group)
        usage = parts[-1].usage
        answer: dict[str, Any] = {
            "prompt": prompts[choice],
            "text": "".join(event.text for event in parts),
            "finish_reason": parts[-1].finish,
            "usage": {
                "prompt_tokens": usage.prompt,
                "completion_tokens": usage.completion,
                "cached_tokens": usage.cached,
            },
        }
        logprobs = [_logprob(token) for event in parts for token in event.logprobs]
        _write(json.dumps(answer | ({"logprobs": logprobs} if logprobs else {}), ensure_ascii=False) + "\n")


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    named: dict[str, Any] = {
        "token": token.token,
        "id": token.token_id,
        "bytes": list(token.bytes),
        "logprob": max(token.logprob, LOWEST_LOGPROB),
    }
    return named | ({"top": [_logprob(other) for other in token.top]} if token.top else {})


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# chat


def chat(service: Service, params: SamplingParams, *, system: str | None, stop: Sequence[str]) -> None:
    """Talk until /bye, Ctrl-D, Ctrl-C on an empty line or the end of a piped input. HELP lists the commands.

    On a terminal, lines can be edited and those before called back. An error of one turn is told in one line and the
    conversation stays as it was. Raises UnavailableError when the engine is dead.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    conversation = Conversation(service, _settle(service, params), system, tuple(stop))
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    _tell(f"{service.model_id}, loaded in {service.load_seconds:.1f} s. /help shows the commands, /bye ends.")
    if not service.dialect.is_chat:
        _tell("This model has no chat template: it continues the text instead of answering.")
    for line in _lines(prompt):
        try:
            if line.strip() in ("/bye", "/exit"):
                break
            conversation.take(line)
        except UnavailableError:
            raise
        except TorchchatError as error:
            _tell(f"error: {error.message}")


def _lines(prompt: str) -> Iterator[str]:
    """What is typed or piped in."""
    typed: Callable[[], str] = str
    if prompt:
        try:
            import readline  # input() uses it from now on
        except ImportError:
            pass
        else:
            typed = readline.get_line_buffer
    else:
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # the tokenizer refuses bad UTF-8
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            _tell("")
            if not typed():
                return
        except EOFError:
            if prompt:
                _tell("")
            return


@dataclass(slots=True)
class Conversation:
    """What was said so far, and the next turn of it."""

    service: Service
    params: SamplingParams
    system: str | None = None
    stop: tuple[str, ...] = ()
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    usage: Usage | None = None  # of the latest answer

    def take(self, line: str) -> None:
        """Obey a command or answer a message. Raises TorchchatError; the messages are then those before."""
        command, _, rest = line.strip().partition(" ")
        if not re.fullmatch(r"/\w+", command):
            if command:
                self.answer(line)
        elif command == "/reset":
            self.messages.clear()
            _tell("The conversation is forgotten.")
        elif command == "/system":
            if rest.strip():
                self.system = rest.strip()
            _tell("There is no system message." if self.system is None else f"System message: {self.system}")
        elif command == "/help":
            _tell(HELP)
        else:
            raise SetupError(f"there is no command {command}; /help shows them.")

    def answer(self, text: str) -> None:
        """Print the answer to a message as it is made; both then belong to the conversation. Ctrl-C ends the answer:
        what there is of it stays, and if there is nothing, the message goes too."""
        asked = [*self.messages, {"role": "user", "content": text}]
        meter, written = Meter(), ""
        with _interruptible() as interrupted:
            prompt = self.service.dialect.render([*_system(self.system), *asked])
            try:
                with closing(self._read(prompt)) as events:
                    for event in events:
                        if interrupted.is_set():
                            break
                        if event is not None:
                            meter.note(event)
                            _require_success(event)
                            _write(event.text)
                            written += event.text
            finally:
                if written and not written.endswith("\n"):
                    _write("\n")
        stopped = interrupted.is_set()
        if written or not stopped:
            self.messages = [*asked, {"role": "assistant", "content": written}]
        self.usage = meter.usage.get(0)
        _tell(f"[{'stopped, ' if stopped else ''}{meter.describe()}]")
        context = self.service.engine.context_length
        if not stopped and self.usage is not None and self.usage.prompt + self.usage.completion >= context:
            _tell(f"The context of {context} tokens is full: /reset begins a new conversation.")

    def _read(self, prompt: Sequence[int]) -> TextStream:
        try:
            return _read(self.service, [Request(prompt, self.params)], self.stop, answering=True)
        except ContextLengthError as error:
            context = self.service.engine.context_length
            raise ContextLengthError(
                f"with this message the conversation has {len(prompt)} tokens, which leaves no room for an answer in"
                f" the context of {context}. Write less, or /reset to begin a new conversation."
            ) from error


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the flag instead of raising KeyboardInterrupt wherever it happens to come."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
