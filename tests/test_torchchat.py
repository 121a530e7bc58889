"""The command line: every flag reaches its place, errors are one line, --help is quick."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import torchchat
from engine.types import LoadOptions, SamplingParams
from errors import CheckpointError
from models import registry

ROOT = Path(__file__).parents[1]


class Loaded(str):
    """A Service that can only be closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


@dataclass
class Recorder:
    """Stands where generate.py, terminal.py and server.py are, and keeps what it was called with."""

    options: LoadOptions | None = None
    path: Path | None = None
    defaults: SamplingParams | None = None
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    error: BaseException | None = None
    threads: str | None = None
    loaded: Loaded = field(default_factory=lambda: Loaded("service"))

    def load(self, options: LoadOptions, path: Path, defaults: SamplingParams) -> Loaded:
        self.options, self.path, self.defaults = options, path, defaults
        self.threads = os.environ.get("OMP_NUM_THREADS")
        if self.error is not None:
            raise self.error
        return self.loaded

    def complete(self, *args: Any, **how: Any) -> None:
        self.calls.append(("complete", args, how))

    def chat(self, *args: Any, **how: Any) -> None:
        self.calls.append(("chat", args, how))

    def serve(self, model_id: str, load: Callable[[], Loaded], **how: Any) -> int:
        self.calls.append(("serve", (model_id, load()), how))
        return 3


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    stand_in: Any = types.SimpleNamespace(
        load=recorder.load, complete=recorder.complete, chat=recorder.chat, serve=recorder.serve
    )
    monkeypatch.setitem(sys.modules, "generate", stand_in)
    monkeypatch.setitem(sys.modules, "terminal", stand_in)
    monkeypatch.setitem(sys.modules, "server", stand_in)
    return recorder


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No OMP_ variables of the machine's, and none left behind; an empty model folder."""
    for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCHCHAT_MODELDIR", str(tmp_path / "models"))
    yield
    for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES"):
        os.environ.pop(name, None)


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def invoke(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(torchchat.cli, list(args), input=stdin)


def test_generate_passes_its_defaults(recorder: Recorder, weights: str) -> None:
    assert invoke("generate", weights, "--prompt", "Once").exit_code == 0
    assert recorder.options == LoadOptions("tiny")
    assert (recorder.path, recorder.defaults) == (Path(weights), SamplingParams())
    how = {"num_samples": 1, "system": None, "raw": False, "stop": (), "as_json": False}
    params = SamplingParams(temperature=0.8, top_k=200)
    assert recorder.calls == [("complete", ("service", ["Once"], params), how)]
    assert recorder.loaded.closed


LOADING = {
    "--dtype bf16": {"dtype": "bfloat16"},
    "--dtype fp32": {"dtype": "float32"},
    "--dtype float16": {"dtype": "float16"},
    "--device cuda": {"device": "cuda"},
    "--quantize int8": {"quantize": "int8"},
    '--quantize {"linear:int8":{"groupsize":0}}': {"quantize": '{"linear:int8":{"groupsize":0}}'},
    "--compile": {"compile": "default"},
    "--compile=max": {"compile": "max"},
    "--compile=default": {"compile": "default"},
    "--max-seq-length 99": {"max_seq_length": 99},
    "--max-batch 3": {"max_batch": 3},
    "--max-queue 0": {"max_queue": 0},
    "--threads 2": {"threads": 2},
    "--deterministic": {"deterministic": True},
    "--no-deterministic": {"deterministic": False},
    "--no-prefix-cache": {"prefix_cache": False},
}


@pytest.mark.parametrize("command", ["generate", "chat", "server"])
@pytest.mark.parametrize(("flags", "expected"), LOADING.items(), ids=LOADING)
def test_loading_flags_reach_load_options(
    recorder: Recorder, weights: str, command: str, flags: str, expected: dict[str, Any]
) -> None:
    prompt = ["--prompt", "x"] if command == "generate" else []
    result = invoke(command, *flags.split(" "), weights, *prompt)  # a bare --compile does not swallow MODEL
    assert result.exit_code in (0, 3), result.output
    assert recorder.options == LoadOptions("tiny", **expected)


def test_every_loading_option_is_tried_and_files_are_paths(recorder: Recorder, weights: str) -> None:
    tried = {name for expected in LOADING.values() for name in expected}
    assert tried | {"model", "tokenizer", "chat_template"} == {f.name for f in fields(LoadOptions)}
    invoke("chat", weights, "--tokenizer", weights, "--chat-template", weights)
    assert recorder.options == LoadOptions("tiny", tokenizer=Path(weights), chat_template=Path(weights))
    invoke("chat", weights, "--tokenizer-path", weights)
    assert recorder.options == LoadOptions("tiny", tokenizer=Path(weights))


SAMPLING: dict[str, dict[str, Any]] = {
    "--temperature 0": {"temperature": 0.0},
    "--top-k -1": {"top_k": -1},
    "--top-p 0.5": {"top_p": 0.5},
    "--min-p 0.1": {"min_p": 0.1},
    "--repetition-penalty 1.5": {"repetition_penalty": 1.5},
    "--presence-penalty -1": {"presence_penalty": -1.0},
    "--frequency-penalty 2": {"frequency_penalty": 2.0},
    "--logit-bias 5=-1.5 --logit-bias 6=100": {"logit_bias": {5: -1.5, 6: 100.0}},
    "--seed -9223372036854775808": {"seed": -(2**63)},
    "--max-new-tokens 7": {"max_tokens": 7},
    "--max-tokens 7": {"max_tokens": 7},
    "--min-tokens 2": {"min_tokens": 2},
    "--min-new-tokens 2": {"min_tokens": 2},
    "--ignore-eos": {"ignore_eos": True},
}


@pytest.mark.parametrize(("flags", "expected"), SAMPLING.items(), ids=SAMPLING)
def test_sampling_flags_reach_sampling_params(
    recorder: Recorder, weights: str, flags: str, expected: dict[str, Any]
) -> None:
    assert invoke("server", weights, *flags.split()).exit_code == 3
    assert recorder.defaults == SamplingParams(**expected)  # server-wide: what was not given stays absent
    assert invoke("chat", weights, *flags.split()).exit_code == 0
    assert invoke("generate", weights, "--prompt", "x", *flags.split()).exit_code == 0
    for _, args, _ in recorder.calls[1:]:
        assert args[-1] == SamplingParams(**{"temperature": 0.8, "top_k": 200} | expected)


def test_every_sampling_field_has_an_option(recorder: Recorder, weights: str) -> None:
    tried = {name for expected in SAMPLING.values() for name in expected}
    assert tried | {"stop_ids", "logprobs"} == {f.name for f in fields(SamplingParams)}
    assert (
        invoke("generate", weights, "--prompt=x", "--json", "--logprobs=2", "--stop-id=3", "--stop-id=4").exit_code == 0
    )
    _, args, how = recorder.calls[0]
    assert args[2] == SamplingParams(temperature=0.8, top_k=200, logprobs=2, stop_ids=frozenset({3, 4}))
    assert how["as_json"] is True


def test_generate_takes_prompts_from_everywhere(recorder: Recorder, weights: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("from a file\n\n", encoding="utf-8")
    flags = ["--prompt", "-", "--prompt", "é", "--prompt-file", str(tmp_path / "p.txt"), "--num-samples", "2"]
    result = invoke(
        "generate", weights, *flags, "--system", "Be brief.", "--stop", "\n", "--stop", "END", stdin="typed\r\n"
    )
    assert result.exit_code == 0, result.output
    _, args, how = recorder.calls[0]
    assert args[1] == ["typed", "é", "from a file\n"]
    assert how == {"num_samples": 2, "system": "Be brief.", "raw": False, "stop": ("\n", "END"), "as_json": False}
    assert invoke("generate", weights, "--prompt", "x", "--raw").exit_code == 0
    assert recorder.calls[1][2]["raw"] is True


def test_chat_and_server_options_arrive(recorder: Recorder, weights: str) -> None:
    assert invoke("chat", weights, "--system", "Be kind.", "--stop", "END").exit_code == 0
    assert recorder.calls[0][2] == {"system": "Be kind.", "stop": ("END",)}
    assert invoke("server", weights).exit_code == 3
    listen = {"host": "127.0.0.1", "port": 5000, "grace": 30.0, "strict_model": False}
    assert recorder.calls[1] == ("serve", ("tiny", "service"), listen | {"threads": 8 + 64 + torchchat.SPARE_THREADS})
    flags = ["--host", "0.0.0.0", "--port", "0", "--grace", "1.5", "--max-batch", "2", "--max-queue", "1"]
    invoke("server", weights, *flags, "--strict-model")
    listen = {"host": "0.0.0.0", "port": 0, "grace": 1.5, "strict_model": True}
    assert recorder.calls[2][2] == listen | {"threads": 3 + torchchat.SPARE_THREADS}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "W"], "nothing to answer"),
        (["generate", "W", "--prompt", "x", "--raw", "--system", "s"], "use one of them"),
        (["generate", "W", "--prompt", "x", "--logprobs", "1"], "--json only"),
        (["generate", "W", "--prompt", "x", "--temperature", "3"], "--temperature"),
        (["generate", "W", "--prompt", "x", "--temperature", "nan"], "temperature must be"),
        (["chat", "W", "--logit-bias", "a=b"], "not a token id and a number"),
        (["chat", "W", "--logit-bias", "1=101"], "logit_bias must be between"),
        (["chat", "W", "--seed", str(2**63)], "seed must be"),
        (["server", "W", "--compile=fast"], "--compile"),
        (["server", "W", "--port", "70000"], "--port"),
        (["server", "W", "--max-new-tokens", "0"], "at least 1"),
        (["server", "W", "--tokenizer", "/no/such/file"], "does not exist"),
        (["server"], "MODEL"),
        (["sing"], "sing"),
    ],
)
def test_usage_errors_exit_2_before_anything_loads(
    recorder: Recorder, weights: str, args: list[str], words: str
) -> None:
    result = invoke(*[weights if arg == "W" else arg for arg in args])
    assert result.exit_code == 2
    assert words in result.stderr
    assert recorder.options is None


def test_our_errors_are_one_line_and_exit_1(recorder: Recorder, weights: str) -> None:
    recorder.error = CheckpointError(weights, "is cut off after 4 bytes")
    result = invoke("generate", weights, "--prompt", "x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {weights}: is cut off after 4 bytes\n"
    result = invoke("server", "smolm2")
    assert result.exit_code == 1
    assert re.fullmatch(r"error: unknown model 'smolm2'\. Did you mean smollm2 .*\n", result.stderr)


def test_ctrl_c_exits_130_quietly(recorder: Recorder, weights: str) -> None:
    recorder.error = KeyboardInterrupt()
    result = invoke("generate", weights, "--prompt", "x")
    assert (result.exit_code, result.output) == (130, "")


def test_a_missing_model_is_fetched_before_anything_loads(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def download(model: str, progress: bool | None = None) -> Path:
        order.append(model)
        assert recorder.options is None
        return Path("/models/smollm2/weights.gguf")

    monkeypatch.setattr(registry, "download", download)
    result = invoke("server", "SmolLM2")
    assert result.stderr == "fetching smollm2 (98 MB) ...\n"
    assert order == ["SmolLM2"]
    assert recorder.options == LoadOptions("smollm2")
    assert recorder.path == Path("/models/smollm2/weights.gguf")


def test_threads_are_bound_before_loading_unless_the_user_did(
    recorder: Recorder, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("chat", weights)
    assert recorder.threads == str(torchchat.physical_cores())
    assert (os.environ["OMP_PROC_BIND"], os.environ["OMP_PLACES"]) == ("close", "cores")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    invoke("chat", weights)
    assert (recorder.threads, os.environ["OMP_PROC_BIND"]) == ("7", "false")
    invoke("chat", weights, "--threads", "3")
    assert recorder.threads == "3"


def test_physical_cores_are_at_least_one_and_no_more_than_allowed() -> None:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert allowed is not None
    assert 1 <= torchchat.physical_cores() <= allowed


def test_where_download_and_remove_of_a_users_file(weights: str) -> None:
    assert invoke("where", weights).stdout == f"{weights}\n"
    assert invoke("download", weights).stdout == f"{weights}\n"
    result = invoke("remove", weights)
    assert (result.exit_code, Path(weights).exists()) == (1, True)
    result = invoke("where", "smollm2")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: smollm2 is not on this machine: python torchchat.py download smollm2\n"


def test_list_names_every_model() -> None:
    result = invoke("list")
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names == [entry.name for entry in registry.list_models()]
    assert result.stderr == ""


def commands() -> list[list[str]]:
    return [[], *([name] for name in torchchat.cli.commands)]


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command))
def test_help_explains_every_option_and_shows_defaults(command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    found = torchchat.cli.commands[command[0]] if command else torchchat.cli
    for param in found.params:
        if isinstance(param, click.Option):
            assert param.help, param.name
    if command == ["server"]:
        assert "[default: 127.0.0.1]" in result.output and "[default: 5000; " in result.output


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command))
def test_help_takes_under_300_milliseconds(command: list[str]) -> None:
    """Processor time, the best of three: the clock on the wall also counts what else the machine does."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "torchchat.py", *command, "--help"], cwd=ROOT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(once() for _ in range(3)) < 0.3


def test_a_real_ctrl_c_is_quiet_too() -> None:
    """A whole process, interrupted while it waits for its prompt on standard input."""
    interrupt = "sys.stdin = Mock(**{'buffer.read': lambda: os.kill(os.getpid(), signal.SIGINT)})"
    code = f"import os, signal, sys, torchchat\nfrom unittest.mock import Mock\n{interrupt}\ntorchchat.cli()"
    command = [sys.executable, "-c", code, "generate", "smollm2", "--prompt", "-"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")
