"""`generate`, from the command line to a tiny model and back: what it prints, and what every option does to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import generate
import terminal
import torchchat
from engine.types import LoadOptions, Request, SamplingParams, Usage
from errors import EngineError, SetupError
from generate import Service
from models.dialects.decode import TextEvent
from tests import speakers

ROOT = Path(__file__).parents[1]
GREEDY = ("--temperature", "0")
PROMPT = 18  # tokens of "Hi" in its template


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speakers.write_chat_model(tmp_path_factory.mktemp("chat") / "talker")


@pytest.fixture(scope="module")
def story_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speakers.write_story_model(tmp_path_factory.mktemp("base") / "stories")


@pytest.fixture(scope="module")
def services(chat_model: Path, story_model: Path) -> Iterator[dict[str, Service]]:
    loaded = {
        path.name: generate.load(LoadOptions(path.name, max_batch=4), path, SamplingParams())
        for path in (chat_model, story_model)
    }
    yield loaded
    for service in loaded.values():
        service.close()


@pytest.fixture(autouse=True)
def one_loaded_model(services: dict[str, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process find their model loaded, and the environment is put back after them."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("OMP_PROC_BIND", "false"), ("OMP_PLACES", "cores")):
        monkeypatch.setenv(name, os.environ.get(name, value))
    monkeypatch.setattr(torchchat, "closing", contextlib.nullcontext)
    monkeypatch.setattr(generate, "load", lambda options, path, flags: services[path.name])


def run(model: Path, *args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(torchchat.cli, ["generate", str(model), *args], input=stdin)


def answers(model: Path, *args: str, stdin: str | bytes | None = None) -> list[dict[str, Any]]:
    result = run(model, "--json", *args, stdin=stdin)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def answer(model: Path, *args: str) -> dict[str, Any]:
    (only,) = answers(model, "--prompt", "Hi", *args)
    return only


def ids(model: Path, *args: str) -> list[int]:
    """The tokens of an answer, as logprobs tell them."""
    return [entry["id"] for entry in answer(model, "--logprobs", "0", "--max-new-tokens", "12", *args)["logprobs"]]


# What is printed


def test_the_answer_is_on_stdout_and_one_line_of_measurements_on_stderr(chat_model: Path) -> None:
    result = run(chat_model, "--prompt", "Hi", "--seed", "1", "--max-new-tokens", "9")
    expected = answer(chat_model, "--seed", "1", "--max-new-tokens", "9")
    assert result.stdout == expected["text"] + "\n"
    number = r"\d+\.\d+"
    assert re.fullmatch(
        rf"first token {number} s, prefill ({number} tokens/s|-), decode {number} tokens/s,"
        rf" prompt {PROMPT} tokens \(\d+ cached\), answer 9 tokens; load {number} s\n",
        result.stderr,
    ), result.stderr


def test_the_text_comes_while_it_is_made(
    chat_model: Path, services: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = services["talker"].engine
    before, made = engine.stats().generation_tokens, []
    monkeypatch.setattr(terminal, "_write", lambda text: made.append(engine.stats().generation_tokens - before))
    assert run(chat_model, "--prompt", "Hi", "--ignore-eos", "--max-new-tokens", "1000").exit_code == 0
    assert len(made) > 300
    assert made[1] < 1000 <= made[-1]


def test_samples_share_one_batch_and_are_told_apart(
    chat_model: Path, services: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = services["talker"].engine
    submitted: list[Sequence[Request]] = []
    submit = engine.submit

    def record(requests: Sequence[Request]) -> Any:
        submitted.append(requests)
        return submit(list(requests))

    monkeypatch.setattr(engine, "submit", record)
    flags = ["--seed", "5", "--max-new-tokens", "8", "--num-samples", "3"]
    texts = [one["text"] for one in answers(chat_model, "--prompt", "Hi", *flags)]
    assert [len(requests) for requests in submitted] == [3]
    assert len(set(texts)) == 3
    result = run(chat_model, "--prompt", "Hi", *flags)
    shown = [f"--- sample {i} ---\n{text}" + "\n" * (text[-1:] != "\n") for i, text in enumerate(texts, 1)]
    assert result.stdout == "\n".join(shown)
    assert f"prompt {PROMPT} tokens" in result.stderr and "answer 24 tokens" in result.stderr


def test_more_answers_than_the_engine_holds_are_made_in_turns(
    chat_model: Path, services: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--prompt", "Hi", "--prompt", "Ho", "--seed", "5", "--max-new-tokens", "4", "--num-samples", "40"]
    together = answers(chat_model, *flags)  # 80 of them, 4 rows and 64 places in the queue
    assert [one["prompt"] for one in together] == ["Hi"] * 40 + ["Ho"] * 40
    texts = [one["text"] for one in together]
    assert texts[:3] == [one["text"] for one in answers(chat_model, "--prompt", "Hi", *flags[4:8], "--num-samples=3")]
    assert texts[40] == answers(chat_model, "--prompt", "Ho", *flags[4:8])[0]["text"]


def test_several_prompts_have_titles(chat_model: Path) -> None:
    flags = ["--prompt", "a", "--prompt", "b", "--max-new-tokens", "2"]
    titles = re.findall(r"^--- .* ---$", run(chat_model, *flags).stdout, re.MULTILINE)
    assert titles == ["--- prompt 1 ---", "--- prompt 2 ---"]
    titles = re.findall(r"^--- .* ---$", run(chat_model, *flags, "--num-samples", "2").stdout, re.MULTILINE)
    assert titles == [f"--- prompt {p}, sample {s} ---" for p in (1, 2) for s in (1, 2)]


def test_later_choices_wait_for_those_before() -> None:
    usage = Usage(1, 1, 0)

    def events() -> Iterator[TextEvent]:
        for choice, text, finish in said:
            told.append(text)
            yield TextEvent(choice, text, usage, finish=finish)  # type: ignore[arg-type]

    said = [(1, "x", None), (0, "a", None), (1, "y", "stop"), (0, "b", "stop"), (2, "m", "stop")]
    told: list[str] = []
    ordered = terminal.in_order(events())
    assert (next(ordered).text, told) == ("a", ["x", "a"])  # the first choice does not wait for the others
    assert [event.text for event in ordered] == ["b", "x", "y", "m"]


def test_json_tells_everything(chat_model: Path) -> None:
    told = answer(chat_model, *GREEDY, "--max-new-tokens", "5", "--logprobs", "2")
    assert list(told) == ["prompt", "text", "finish_reason", "usage", "logprobs"]
    assert (told["prompt"], told["finish_reason"]) == ("Hi", "length")
    assert told["usage"]["prompt_tokens"] == PROMPT and told["usage"]["completion_tokens"] == 5
    assert len(told["logprobs"]) <= 5  # those whose text is in the answer
    for entry in told["logprobs"]:
        assert entry["top"][0]["id"] == entry["id"]
        assert len(entry["top"]) == 2 and entry["logprob"] == entry["top"][0]["logprob"] < 0
    data = b"".join(bytes(entry["bytes"]) for entry in told["logprobs"])
    assert data.decode(errors="replace").startswith(told["text"])
    assert "logprobs" not in answer(chat_model, "--max-new-tokens", "1")


# Prompts


def test_the_template_unless_raw(chat_model: Path, services: dict[str, Service]) -> None:
    tokenizer = services["talker"].tokenizer
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    with_template = answer(chat_model, *GREEDY, "--system", "Be brief.", "--max-new-tokens", "9")
    (raw,) = answers(chat_model, *GREEDY, "--raw", "--prompt", rendered, "--max-new-tokens", "9")
    assert raw["usage"]["prompt_tokens"] == len(tokenizer.encode(rendered, special=True))
    assert raw["text"] == with_template["text"]  # control tokens in a raw prompt are control tokens
    plain = answer(chat_model, "--raw", "--max-new-tokens", "1")
    assert plain["usage"]["prompt_tokens"] == len(tokenizer.encode("Hi"))
    (typed,) = answers(chat_model, "--prompt", "<|im_end|>", "--max-new-tokens", "1")  # and in a message they are text
    assert typed["usage"]["prompt_tokens"] == PROMPT - len(tokenizer.encode("Hi")) + len(tokenizer.encode("<|im_end|>"))


def test_a_base_model_continues_and_only_the_continuation_is_printed(
    story_model: Path, services: dict[str, Service]
) -> None:
    tokenizer = services["stories.bin"].tokenizer
    word = tokenizer.encode("a dog")[-1]
    assert tokenizer.token_bytes(word)[:1] == b" "
    flags = [*GREEDY, "--prompt", "a little", "--max-new-tokens", "1", "--logit-bias", f"{word}=100"]
    (told,) = answers(story_model, *flags)
    assert told["text"] == tokenizer.decode([word])  # its space included: prompt + text is the whole
    assert told["usage"]["prompt_tokens"] == len(tokenizer.encode("a little", bos=True))
    assert run(story_model, *flags).stdout == told["text"] + "\n"
    assert answers(story_model, "--raw", *flags)[0]["text"] == told["text"]
    (begun,) = answers(story_model, "--raw", "--prompt", "", "--max-new-tokens", "1")
    assert begun["usage"]["prompt_tokens"] == 1  # BOS


def test_prompts_from_standard_input_and_files(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("é\n", encoding="utf-8")
    flags = ["--prompt", "-", "--prompt-file", str(tmp_path / "p.txt"), "--max-new-tokens", "1"]
    assert [one["prompt"] for one in answers(chat_model, *flags, stdin="piped\n")] == ["piped", "é"]
    result = run(chat_model, "--prompt", "-", stdin=b"\xff\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"error: standard input can't be read as UTF-8 text: .*\n", result.stderr)


# What options do


def test_seeds(chat_model: Path) -> None:
    flags = ["--temperature", "1.5", "--max-new-tokens", "20"]
    texts = {seed: answer(chat_model, *flags, "--seed", seed)["text"] for seed in ("1", "2", "-9223372036854775808")}
    assert len(set(texts.values())) == 3
    assert all(answer(chat_model, *flags, "--seed", seed)["text"] == text for seed, text in texts.items())
    assert len({answer(chat_model, *flags, "--seed", "-1")["text"] for _ in range(2)}) == 2  # -1 is by chance
    assert len({answer(chat_model, *flags)["text"] for _ in range(2)}) == 2


HOT = ("--temperature", "2", "--seed", "3", "--ignore-eos")


@pytest.mark.parametrize("flags", [GREEDY, (*HOT, "--top-k", "1"), (*HOT, "--top-p", "0"), (*HOT, "--min-p", "1")])
def test_narrow_sampling_is_greedy(chat_model: Path, flags: Sequence[str]) -> None:
    assert ids(chat_model, "--ignore-eos", *flags) == ids(chat_model, "--ignore-eos", *GREEDY)
    assert ids(chat_model, *HOT) != ids(chat_model, *HOT, *flags)


@pytest.mark.parametrize("flags", ["--repetition-penalty 50", "--presence-penalty 2", "--frequency-penalty 2"])
def test_penalties_make_less_repetition(story_model: Path, flags: str) -> None:
    def repeats(*more: str) -> int:
        found = ids(story_model, *GREEDY, "--ignore-eos", "--max-new-tokens", "100", *more)
        return len(found) - len(set(found))

    assert repeats(*flags.split()) < repeats()


def test_options_of_length(chat_model: Path) -> None:
    eos = ("--logit-bias", f"{speakers.END}=100")

    def told(*flags: str) -> tuple[int, str]:
        one = answer(chat_model, *eos, *flags)
        return one["usage"]["completion_tokens"], one["finish_reason"]

    assert told() == (1, "stop")
    assert told("--min-tokens", "5") == (6, "stop")
    assert told("--ignore-eos", "--max-new-tokens", "7") == (7, "length")
    assert told("--max-tokens", "0") == (0, "length")


def test_stops(chat_model: Path) -> None:
    whole = answer(chat_model, *GREEDY, "--ignore-eos", "--max-new-tokens", "40")["text"]
    text = max(re.findall(r"[ -~]+", whole), key=len)[-2:]
    told = answer(chat_model, *GREEDY, "--ignore-eos", "--max-new-tokens", "40", "--stop", "never", "--stop", text)
    assert (told["text"], told["finish_reason"]) == (whole[: whole.index(text)], "stop")
    tokens = ids(chat_model, *GREEDY, "--ignore-eos")
    stopped = answer(chat_model, *GREEDY, "--ignore-eos", "--stop-id", str(tokens[2]))
    assert stopped["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == tokens.index(tokens[2]) + 1


def test_logit_bias(chat_model: Path) -> None:
    assert set(ids(chat_model, "--logit-bias", "40=100")) == {40}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stop-id", "999"], r"--stop-id 999 is no token of this model; they go from 0 to \d+\."),
        (["--logit-bias", "999=1"], r"logit_bias: token id 999 is not in 0\.\.\d+\."),
        (["--prompt", "long " * 2000], r"The prompt has \d+ tokens; .*context is 2048 tokens.*"),
        (["--raw", "--prompt", ""], r"The prompt is empty: .*"),
    ],
)
def test_mistakes_are_one_line(chat_model: Path, flags: list[str], message: str) -> None:
    result = run(chat_model, "--prompt", "Hi", *flags)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(rf"error: {message}\n", result.stderr), result.stderr


def test_a_failing_model_is_one_line(
    chat_model: Path, services: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise EngineError("out of memory")

    monkeypatch.setattr(services["talker"].engine.runner, "forward", fail)
    result = run(chat_model, "--prompt", "Hi")
    assert (result.exit_code, result.stderr) == (1, "error: out of memory\n")


# Whole processes


def torchchat_run(*args: str, **how: Any) -> subprocess.CompletedProcess[str]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, "torchchat.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment, **how)


@pytest.mark.parametrize(
    "flags",
    [
        "--dtype bfloat16 --threads 1 --max-batch 2 --max-seq-length 64",
        "--quantize int8",
        "--quantize int4 --no-deterministic",
        '--quantize {"linear:int8":{"groupsize":0}} --no-prefix-cache',
    ],
)
def test_ways_to_load(chat_model: Path, flags: str) -> None:
    command = ["generate", str(chat_model), *flags.split(), "--prompt", "Hi", "--json", *GREEDY, "--ignore-eos"]
    runs = [torchchat_run(*command, "--max-new-tokens=9")]
    if "--max-seq-length" in flags:
        runs.append(torchchat_run(*command))
    for one in runs:
        assert one.returncode == 0, one.stderr
    assert json.loads(runs[0].stdout)["usage"]["completion_tokens"] == 9
    if len(runs) == 2:
        usage = json.loads(runs[1].stdout)["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == 64


@pytest.mark.slow
def test_compiled(chat_model: Path) -> None:
    command = ["generate", str(chat_model), "--prompt", "Hi", *GREEDY, "--max-new-tokens=9"]
    eager, compiled = torchchat_run(*command), torchchat_run(*command, "--compile")
    assert compiled.returncode == 0, compiled.stderr
    assert compiled.stdout == eager.stdout
    assert re.search(r"; load \d+\.\d+ s, compile \d+\.\d+ s\n$", compiled.stderr)


def test_a_whole_process_reads_standard_input(chat_model: Path) -> None:
    flags = ["generate", str(chat_model), "--prompt", "-", "--seed", "7", "--max-new-tokens", "12"]
    one = torchchat_run(*flags, input="Hi\n")
    assert one.returncode == 0, one.stderr
    assert one.stdout == answer(chat_model, *flags[4:])["text"] + "\n"  # the same in another process


def begin(model: Path) -> subprocess.Popen[bytes]:
    """A long answer of which something has arrived."""
    command = [sys.executable, "torchchat.py", "generate", str(model), "--prompt", "Hi", "--ignore-eos"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.read(1)
    return process


def test_ctrl_c_ends_an_answer(chat_model: Path) -> None:
    process = begin(chat_model)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"\n")


def test_a_reader_that_leaves_ends_it_too(chat_model: Path) -> None:
    process = begin(chat_model)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr:
        errors = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert errors == b""


# Loading


def test_parameters_come_from_flags_then_the_checkpoint_then_openai(
    services: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = services["talker"]
    monkeypatch.setattr(service, "defaults", SamplingParams(top_p=0.5, min_p=0.1).over(service.defaults))
    settled = terminal._settle(service, SamplingParams(min_p=0.2, seed=-1))
    assert (settled.top_p, settled.min_p, settled.temperature, settled.seed) == (0.5, 0.2, 1.0, None)
    absent = {f.name for f in fields(settled) if getattr(settled, f.name) is None}
    assert absent == {"seed", "max_tokens", "logprobs"}
    with pytest.raises(SetupError):
        terminal._settle(service, SamplingParams(stop_ids=frozenset({-1})))
