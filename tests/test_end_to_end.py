"""The whole product over HTTP: a tiny random model, the real engine and real clients."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from engine.reference import reference_generate
from engine.types import DEFAULT_SAMPLING, Request, SamplingParams
from models.dialects.decode import decode_stream
from tests import speakers
from tests.whole import MODEL, Served, serve, until

END = speakers.END
HI: list[Any] = [{"role": "user", "content": "Hi there"}]
# Random weights give bytes that are no UTF-8 too.
GOLDEN = "\x14\ufffdi\ufffd<7\ufffd<\ufffd\ufffd\ufffd\ufffd\ufffd/f\ufffdf\ufffdf\ufffdffff"
LONG = "tell me a story about a dog. " * 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speakers.write_chat_model(tmp_path_factory.mktemp("whole") / MODEL)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with serve(model) as running:
        yield running


@pytest.fixture(autouse=True)
def rows_are_free_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    used = [request.getfixturevalue(name) for name in ("served", "small") if name in request.fixturenames]
    yield
    for each in used:
        each.wait(running=0)


def frames(body: str) -> list[Any]:
    """The data of a stream, [DONE] included."""
    parts = body.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part[6:]) if part != "data: [DONE]" else "[DONE]" for part in parts]


def stream(served: Served, **fields: Any) -> list[Any]:
    return frames(served.send("/chat", {"messages": HI, "stream": True, **fields}).text)


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"] if c["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


# --- one answer


def test_a_golden_text(served: Served) -> None:
    """Template, tokenizer, model, sampling and decoding: whoever changes one of them knows it here."""
    answer = served.ask("Once upon a time", temperature=0, max_tokens=24)
    assert answer["choices"][0]["message"]["content"] == GOLDEN
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 23


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 3},
        {"seed": 3, "n": 3, "max_tokens": 12},
        {"seed": 4, "stop": ["me", "th"], "logprobs": True, "top_logprobs": 2},
        {"temperature": 0, "logit_bias": {END: 100}, "min_tokens": 7},
        {"temperature": 0, "max_tokens": 1},
        {"temperature": 0, "logit_bias": {END: 100}},
    ],
)
def test_streamed_equals_whole(served: Served, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 40, **fields}
    served.ask(**fields)  # so that both find the same prompt in the cache
    whole = served.ask(**fields)
    *chunks, usage, done = stream(served, stream_options={"include_usage": True}, **fields)
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert streamed_text(chunks, choice["index"]) == choice["message"]["content"]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"] is not None:
            entries = [entry for p in parts if p["logprobs"] for entry in p["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]


def test_http_adds_nothing_to_the_engines_own_answer(served: Served) -> None:
    behind = served.behind
    prompt = behind.dialect.render(HI)
    params = SamplingParams(seed=11, max_tokens=30, ignore_eos=True).over(DEFAULT_SAMPLING)
    requests = [Request(prompt, params, choice) for choice in range(2)]
    texts = ["", ""]
    for event in decode_stream(behind.engine.submit(requests), behind.tokenizer, prompts=[prompt] * 2):
        if event is not None:
            texts[event.choice] += event.text
    answer = served.ask(seed=11, max_tokens=30, ignore_eos=True, n=2)
    assert [choice["message"]["content"] for choice in answer["choices"]] == texts
    assert texts[0] != texts[1]


# --- clients


def test_the_sdk_whole_with_strict_validation(served: Served) -> None:
    with served.sdk(_strict_response_validation=True) as sdk:
        made = sdk.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=8, n=2, seed=1, logprobs=True, top_logprobs=3
        )
        assert [m.id for m in sdk.models.list()] == [sdk.models.retrieve(MODEL).id] == [MODEL]
    assert made.usage is not None and made.usage.completion_tokens <= 16
    for choice in made.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


def test_the_sdk_streams_with_strict_validation(served: Served) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": HI, "seed": 2, "max_tokens": 60, "logit_bias": {END: 9}}
    ask["extra_body"] = {"min_tokens": 4}
    with served.sdk(_strict_response_validation=True) as sdk:
        whole = sdk.chat.completions.create(**ask)
        assert whole.choices[0].finish_reason == "stop"  # the SDK's helper raises for the other one
        chunks = list(sdk.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        with sdk.chat.completions.stream(**ask) as helper:
            kinds = {event.type for event in helper}
            final = helper.get_final_completion()
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == final.choices[0].message.content == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert {"content.delta", "content.done", "chunk"} <= kinds


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 30},
    {"seed": 1, "max_tokens": 40, "logprobs": True, "top_logprobs": 1},
    {"seed": 2, "temperature": 0.5, "top_k": 20, "max_tokens": 35},
    {"seed": 3, "temperature": 1.5, "top_p": 0.9, "max_tokens": 25},
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": -0.5, "max_tokens": 45},
    {"seed": 4, "stop": ["m", "st"], "max_tokens": 50},
    {"seed": 5, "repetition_penalty": 1.3, "min_p": 0.05, "max_tokens": 20, "min_tokens": 10},
    {"seed": 6, "n": 1, "logit_bias": {"270": 5, "1": -100}, "max_tokens": 33},
]


def test_eight_at_once_get_what_they_get_alone(served: Served) -> None:
    asks = [
        {"messages": [{"role": "user", "content": f"{i} " + "dog " * 7 * i}], "ignore_eos": True, **fields}
        for i, fields in enumerate(REQUESTS)
    ]

    def comparable(answer: dict[str, Any]) -> Any:
        usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        return answer["choices"], usage

    alone = [comparable(served.post("/chat", ask)) for ask in asks]

    async def together() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk:

            async def one(ask: dict[str, Any]) -> Any:
                reply = await sdk.post("/chat/completions", body=ask, cast_to=object)
                return comparable(reply)  # type: ignore[arg-type]

            return await asyncio.gather(*map(one, asks))

    for _ in range(3):
        assert asyncio.run(together()) == alone


# --- every sampling field does what it says


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"seed": 7},
        {"seed": 7, "temperature": 0.3},
        {"seed": 7, "top_k": 3},
        {"seed": 7, "top_p": 0.4},
        {"seed": 7, "min_p": 0.3},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.0, "presence_penalty": 2.0},
        {"temperature": 0.0, "frequency_penalty": 2.0},
        {"temperature": 0.0, "logit_bias": {"70": 3.0}},
    ],
    ids=str,
)
def test_fields_reach_the_engine_and_change_the_text(served: Served, fields: dict[str, Any]) -> None:
    """Held to the slow reference; and but for the field, the text is another."""
    behind = served.behind
    given = {name: {70: 3.0} if name == "logit_bias" else value for name, value in fields.items()}
    params = SamplingParams(**given, max_tokens=24, ignore_eos=True).over(DEFAULT_SAMPLING)
    prompt = behind.dialect.render(HI)
    context = behind.engine.context_length
    expected = reference_generate(behind.engine.runner.model, Request(prompt, params), context_length=context)
    text = served.text(**{"temperature": 1, **fields})
    assert text == behind.tokenizer.decode(expected.tokens)
    without = {name: value for name, value in fields.items() if name in ("temperature", "seed")}
    assert text != served.text(
        **({"temperature": 1, **without} if without != fields else {"seed": 8, "temperature": 1})
    )


def test_greedy_whatever_the_seed_and_by_every_way(served: Served) -> None:
    text = served.text(temperature=0)
    ways: list[dict[str, Any]] = [
        {"temperature": 0, "seed": 5},
        {"temperature": 2, "top_k": 1},
        {"temperature": 1, "top_p": 0},
        {"temperature": 1, "min_p": 1},
        {"temperature": 1e-5},
    ]
    assert [served.text(**way) for way in ways] == [text] * len(ways)


@pytest.mark.parametrize("seed", [0, -5, 2**63 - 1])
def test_a_seed_reproduces(served: Served, seed: int) -> None:
    text = served.text(temperature=1, seed=seed)
    assert served.text(temperature=1, seed=seed) == text
    assert served.text(temperature=1, seed=seed - 1) != text


def test_no_seed_and_minus_one_are_random(served: Served) -> None:
    texts = {served.text(temperature=1, **fields) for fields in ({}, {}, {"seed": -1}, {"seed": -1})}
    assert len(texts) == 4


def test_logit_bias_forces_and_bans(served: Served) -> None:
    tokenizer = served.behind.tokenizer
    (letter,) = tokenizer.encode("d")
    assert served.text(temperature=1, logit_bias={letter: 100}, max_tokens=5) == "ddddd"
    free = served.text()
    (likeliest,) = tokenizer.encode(free[0])
    assert served.text(logit_bias={likeliest: -100})[:1] != free[0]


def test_stop_strings_end_the_text_before_them(served: Served) -> None:
    whole = served.text(max_tokens=60)
    stop = next(
        whole[i : i + 2] for i in range(20, 60) if whole[i : i + 2].isascii() and whole[i : i + 2].isprintable()
    )
    answer = served.ask(temperature=0, ignore_eos=True, max_tokens=60, stop=stop)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert answer["usage"]["completion_tokens"] < 60
    absent = served.ask(temperature=0, ignore_eos=True, max_tokens=60, stop=["Hi there", "", "never"])
    assert absent["choices"][0]["message"]["content"] == whole


def test_token_limits_and_end_tokens(served: Served) -> None:
    def ending(**fields: Any) -> tuple[str, int, str]:
        answer = served.ask(temperature=0, max_tokens=9, logit_bias={END: 100}, **fields)
        choice = answer["choices"][0]
        return choice["finish_reason"], answer["usage"]["completion_tokens"], choice["message"]["content"]

    free = served.ask(temperature=0, max_tokens=4, logit_bias={END: -100})
    four = free["choices"][0]["message"]["content"]
    assert ending() == ("stop", 1, "")
    assert ending(min_tokens=4) == ("stop", 5, four)
    assert ending(ignore_eos=True) == ("length", 9, "")
    for count in (1, 2, 13):
        answer = served.ask(temperature=0, ignore_eos=True, max_completion_tokens=count, max_tokens=3)
        assert answer["usage"]["completion_tokens"] == count
        assert answer["choices"][0]["finish_reason"] == "length"
    (letter,) = served.behind.tokenizer.encode("d")
    stopped = served.ask(temperature=0, max_tokens=9, logit_bias={letter: 100}, stop_token_ids=[letter])
    assert (stopped["choices"][0]["finish_reason"], stopped["choices"][0]["message"]["content"]) == ("stop", "")


def test_without_max_tokens_the_context_is_the_limit(served: Served) -> None:
    context = served.behind.engine.context_length
    (letter,) = served.behind.tokenizer.encode("d")
    prompt = [letter] * (context - 40)
    answer = served.post("/v1/completions", {"prompt": prompt, "max_tokens": 5000, "logit_bias": {letter: 100}})
    assert answer["usage"]["total_tokens"] == context
    assert answer["choices"][0]["text"] == "d" * 40
    chat = served.ask("d" * (context - 60), logit_bias={letter: 100})
    assert chat["usage"]["total_tokens"] == context


def test_logprobs_are_those_of_the_raw_logits(served: Served) -> None:
    """Whatever temperature, bias and penalties did to the choice: the scores are those of the text itself."""
    answer = served.ask(seed=9, temperature=1.8, presence_penalty=1, max_tokens=10, logprobs=True, top_logprobs=4)
    content = answer["choices"][0]["logprobs"]["content"]
    text = answer["choices"][0]["message"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == text
    tokenizer = served.behind.tokenizer
    ids = [next(i for i in range(2, 288) if tokenizer.token_bytes(i) == bytes(e["bytes"])) for e in content]
    prompt = served.behind.dialect.render(HI)
    body = {"prompt": prompt + ids, "echo": True, "logprobs": 4, "max_tokens": 0}
    scored = served.post("/v1/completions", body)["choices"][0]["logprobs"]
    for i, entry in enumerate(content):
        assert entry["logprob"] == pytest.approx(scored["token_logprobs"][len(prompt) + i], abs=1e-4)
        top = [each["logprob"] for each in entry["top_logprobs"]]
        assert len(top) == 4
        assert top == sorted(top, reverse=True)
        assert top[0] == pytest.approx(max(scored["top_logprobs"][len(prompt) + i].values()), abs=1e-4)


# --- choices and text completions


def test_choices_are_distinct_reproducible_and_independent_of_their_number(served: Served) -> None:
    def texts(n: int) -> list[str]:
        answer = served.ask(seed=21, n=n, max_tokens=16, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 16 * n
        return [choice["message"]["content"] for choice in answer["choices"]]

    four = texts(4)
    assert len(set(four)) == 4
    assert texts(4) == four
    assert texts(2) == four[:2]


def test_completions_take_a_prompt_in_every_form(served: Served) -> None:
    ids = served.behind.tokenizer.encode("Once upon")
    other = served.behind.tokenizer.encode("hello")

    def texts(prompt: Any, **fields: Any) -> list[str]:
        body = {"prompt": prompt, "seed": 3, "ignore_eos": True, **fields}
        answer = served.post("/v1/completions", body)
        return [choice["text"] for choice in sorted(answer["choices"], key=lambda c: int(c["index"]))]

    (one,) = texts("Once upon")
    assert texts(ids) == texts(["Once upon"]) == texts([ids]) == [one]
    assert texts(["Once upon", "hello"]) == texts([ids, other]) == [one, *texts("hello")]
    assert texts(["Once upon", "hello"], n=2)[::2] == [one, *texts("hello")]
    assert texts("Once upon", echo=True) == ["Once upon" + one]
    assert served.post("/v1/completions", {"prompt": ids, "ignore_eos": True})["usage"]["completion_tokens"] == 16
    body = {"prompt": ["Once upon", "hello"], "seed": 3, "ignore_eos": True, "stream": True}
    *chunks, done = frames(served.send("/v1/completions", body).text)
    assert done == "[DONE]"
    parts: dict[int, str] = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            parts[choice["index"]] += choice["text"]
    assert list(parts.values()) == [one, *texts("hello")]


def test_scoring_a_text_equals_the_models_own_logits(served: Served) -> None:
    """What lm-evaluation-harness asks: echo, logprobs, max_tokens 0."""
    text = "Once upon a time there was a dog"
    body = {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 0}
    answer = served.post("/v1/completions", body)
    behind = served.behind
    ids = behind.tokenizer.encode(text)
    nothing = SamplingParams(temperature=0, max_tokens=0).over(DEFAULT_SAMPLING)
    expected = reference_generate(
        behind.engine.runner.model, Request(ids, nothing, prompt_logprobs=2), context_length=2048
    ).prompt_logprobs
    assert expected is not None
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert answer["usage"]["completion_tokens"] == 0
    scores = choice["logprobs"]["token_logprobs"]
    assert scores[0] is None and expected[0] is None
    assert scores[1:] == pytest.approx([entry[0] for entry in expected[1:] if entry is not None], abs=1e-4)
    assert "".join(choice["logprobs"]["tokens"]) == text
    offsets = choice["logprobs"]["text_offset"]
    assert all(text.startswith(t, o) for t, o in zip(choice["logprobs"]["tokens"], offsets, strict=True))
    assert served.post("/v1/completions", body)["choices"] == answer["choices"]


def test_the_prompt_cache_is_told_and_changes_nothing(served: Served, model: Path) -> None:
    first = served.ask(LONG, temperature=0, max_tokens=20, logprobs=True)
    second = served.ask(LONG, temperature=0, max_tokens=20, logprobs=True)
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert second["choices"] == first["choices"]
    with serve(model, prefix_cache=False) as cold:
        for _ in range(2):
            answer = cold.ask(LONG, temperature=0, max_tokens=20, logprobs=True)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert answer["choices"] == first["choices"]


# --- refusals


@pytest.mark.parametrize("streaming", [True, False])
def test_a_prompt_beyond_the_context_is_a_400(served: Served, streaming: bool) -> None:
    context = served.behind.engine.context_length
    with served.sdk() as sdk, pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * context}], stream=streaming
        )
    assert caught.value.code == "context_length_exceeded"
    for length, status in ((context - 1, 200), (context, 400)):
        body = {"prompt": [70] * length, "stream": streaming, "max_tokens": 3, "ignore_eos": True}
        reply = served.send("/v1/completions", body)
        assert reply.status_code == status
        assert status == 400 or reply.text.count('"finish_reason":"length"') == 1


def test_user_text_is_no_control_token(served: Served) -> None:
    plain = served.ask("<|im_end|>", max_tokens=1)["usage"]["prompt_tokens"]
    assert plain == served.ask("", max_tokens=1)["usage"]["prompt_tokens"] + len("<|im_end|>")
    refused = served.send("/chat", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}')
    assert refused.status_code == 400


def test_a_templates_own_complaint_is_a_400(served: Served) -> None:
    reply = served.send("/chat", {"messages": [*HI, {"role": "system", "content": "x"}]})
    assert reply.status_code == 400
    assert "system comes first" in reply.json()["error"]["message"]


# --- flags and files


def test_server_flags_then_generation_config_then_openai(model: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / MODEL
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 1, "eos_token_id": [1]}))
    with serve(folder, SamplingParams(temperature=0.9, max_tokens=7), strict_model=True) as running:
        defaults = running.service.defaults
        assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.max_tokens) == (0.9, 1, 1.0, 7)
        greedy = running.text()
        answer = running.ask(ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 7
        assert greedy.startswith(answer["choices"][0]["message"]["content"].rstrip("\ufffd"))
        assert running.text(temperature=1, top_k=0, seed=1) != greedy
        for name, status in ((MODEL, 200), ("gpt-4", 404)):
            reply = running.send("/chat", {"messages": HI, "model": name, "max_tokens": 1})
            assert reply.status_code == status
        assert reply.json()["error"]["code"] == "model_not_found"


def test_stop_ids_as_a_flag(model: Path, served: Served) -> None:
    """The server's and the request's own both end an answer."""
    usual = served.ask(temperature=0, ignore_eos=True, max_tokens=6, logprobs=True)
    texts = [entry["token"] for entry in usual["choices"][0]["logprobs"]["content"]]
    ids = [served.service.tokenizer.encode(text)[0] for text in texts]
    with serve(model, SamplingParams(temperature=0.0, stop_ids=frozenset({ids[0]}))) as running:
        answer = running.ask(stop_token_ids=[ids[1]])
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1


def test_temperature_0_as_a_flag(model: Path, served: Served) -> None:
    with serve(model, SamplingParams(temperature=0.0)) as running:
        texts = [running.ask(max_tokens=20, ignore_eos=True)["choices"][0]["message"]["content"] for _ in range(2)]
        assert texts == [served.text(max_tokens=20)] * 2


# --- clients that leave, queues, failures


class Gate:
    """Stands before the model: each step waits until it is let through."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = served.behind.engine.runner
        self._forward, self._passes = runner.forward, threading.Semaphore(0)
        self.steps = 0  # that have come to the gate
        self._opened = False
        self.failure: BaseException | None = None
        monkeypatch.setattr(runner, "forward", self)

    def __call__(self, *args: Any) -> torch.Tensor:
        self.steps += 1
        if not self._opened:
            assert self._passes.acquire(timeout=20)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return self._forward(*args)

    def reached(self, steps: int = 1) -> None:
        until(lambda: self.steps >= steps)

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._passes.release()

    def open(self) -> None:
        self._opened = True
        self._passes.release(1)


@pytest.fixture(scope="module")
def small_server(model: Path) -> Iterator[Served]:
    with serve(model, max_batch=2, max_queue=1) as running:
        yield running


@pytest.fixture
def small(small_server: Served) -> Served:
    return small_server


@pytest.fixture
def gate(small: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(small, monkeypatch)
    yield made
    made.open()
    small.wait(running=0)


def chat(streaming: bool = True, content: str = "Hi there", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "stream": streaming, "ignore_eos": True, **fields}


@pytest.mark.parametrize("streaming", [True, False])
def test_leaving_during_decode_frees_the_row(small: Served, gate: Gate, streaming: bool) -> None:
    def decoding() -> None:
        gate.let(5)
        gate.reached(6)

    small.leave(chat(streaming), decoding)
    steps = gate.steps
    threading.Thread(target=gate.open).start()
    small.wait(running=0, seconds=1)
    assert gate.steps <= steps + 100  # of 2000


@pytest.mark.parametrize("streaming", [True, False])
def test_leaving_during_prefill_frees_the_row(small: Served, gate: Gate, streaming: bool) -> None:
    small.leave(chat(streaming, str(streaming) + LONG * 2), gate.reached)
    sequence = small.behind.engine.scheduler.running[0]
    assert sequence.prefilling
    until(lambda: sequence.cancelled, 1)  # though no event came
    gate.let(1)
    small.wait(running=0, seconds=1)
    assert gate.steps == 1
    assert sequence.prefilling and sequence.finished == "cancelled"


def test_leaving_the_queue(small: Served, gate: Gate) -> None:
    gate.let(1)
    with small.send("/chat", chat(n=2), stream=True):
        gate.reached()
        small.leave(chat(False), lambda: small.wait(running=2, waiting=1))
        gate.open()
        small.wait(running=2, waiting=0, seconds=1)
    small.wait(running=0)


def test_a_full_queue_is_a_429(small: Served, gate: Gate) -> None:
    refused = small.send("/chat", chat(n=4))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "n"
    gate.let(1)
    with small.send("/chat", chat(n=3, max_tokens=4), stream=True) as running:
        gate.reached(2)
        for streaming in (True, False):
            full = small.send("/chat", chat(streaming))
            assert full.status_code == 429
            assert full.headers["Retry-After"] == "1"
            assert full.json()["error"]["code"] == "rate_limit_exceeded"
        metrics = small.get("/metrics").text
        assert "torchchat_requests_running 2.0" in metrics and "torchchat_requests_waiting 1.0" in metrics
        gate.open()
        assert running.content.endswith(b"data: [DONE]\n\n")
    assert small.text() == small.text()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("steps", [0, 3], ids=["prefill", "decode"])
def test_a_failing_step_ends_its_requests_only(small: Served, gate: Gate, steps: int) -> None:
    gate.open()
    expected = small.text()
    gate._opened = False
    for streaming in (True, False):
        came = gate.steps
        gate.let(steps)

        def fail(step: int = came + steps + 1) -> None:
            gate.reached(step)
            gate.failure = RuntimeError("out of memory")
            gate.let(1)

        failing = threading.Thread(target=fail)
        failing.start()
        reply = small.send("/chat", chat(streaming))
        failing.join()
        if streaming:
            *chunks, last = frames(reply.text)
            assert last["error"].keys() == {"message", "type", "param", "code"}
            assert "out of memory" in last["error"]["message"]
            assert all(c["finish_reason"] is None for chunk in chunks for c in chunk["choices"])
        else:
            assert reply.status_code == 500
            assert reply.json()["error"]["type"] == "server_error"
    gate.open()
    assert small.text() == expected


def test_a_dead_engine_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(model, max_batch=2, max_queue=1) as running:
        assert running.get("/health").status_code == 200

        def die(*_: Any) -> None:
            raise SystemExit("no more")

        monkeypatch.setattr(running.behind.engine.runner, "forward", die)
        last = frames(running.send("/chat", chat()).text)[-1]
        assert "no more" in last["error"]["message"]
        for reply in (running.get("/health"), running.send("/chat", chat())):
            assert reply.status_code == 503
            assert reply.headers["Retry-After"]
        assert "torchchat_engine_up 0.0" in running.get("/metrics").text


def test_a_stream_begins_before_its_first_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and the role come at once, whatever the engine is doing."""
    with serve(model, max_batch=1, max_queue=1) as running:
        gate = Gate(running, monkeypatch)
        with running.send("/chat", chat(max_tokens=6), stream=True) as open_stream:
            gate.reached(1)
            assert open_stream.status_code == 200
            assert b'"delta":{"role":"assistant","content":""}' in next(open_stream.iter_lines())
            gate.open()


def test_draining_lets_streams_finish(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(model, max_batch=2, max_queue=1) as running:
        gate = Gate(running, monkeypatch)
        gate.let(1)
        with running.send("/chat", chat(max_tokens=6), stream=True) as open_stream:
            gate.reached(2)
            running.service.drain()
            for reply in (running.get("/health"), running.send("/chat", chat())):
                assert reply.status_code == 503
            gate.open()
            text = open_stream.text
        assert frames(text)[-1] == "[DONE]"
        assert text.count('"finish_reason":"length"') == 1


def test_metrics_count_what_was_done(small: Served) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in small.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = read()
    answer = small.ask("count me", temperature=0, max_tokens=5, ignore_eos=True)
    until(lambda: read()["torchchat_request_seconds_count"] == before["torchchat_request_seconds_count"] + 1)
    after = read()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("torchchat_generation_tokens_total") == 5
    assert grown("torchchat_prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert grown("torchchat_cached_tokens_total") == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert grown('torchchat_requests_total{finish_reason="length"}') == 1
    assert grown("torchchat_inter_token_seconds_count") == 4
    assert grown("torchchat_time_to_first_token_seconds_count") == 1
    assert after["torchchat_rows"] == 2
