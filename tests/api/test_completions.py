from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import completions
from api.answer import Head
from api.types import TextCompletionRequest, dump
from api.validation import decode
from engine.types import Usage
from errors import RequestError
from models.dialects.decode import TextEvent, TokenLogprob
from tests.api.fakes import FakeService

HEAD = Head("cmpl-1", 5, "M", "fp_x")


def request(**fields: Any) -> TextCompletionRequest:
    return decode(json.dumps({"prompt": "Hi", **fields}).encode(), TextCompletionRequest)


def complete(service: FakeService, **fields: Any) -> dict[str, Any]:
    """The whole answer, through the engine."""
    answer = completions.answer(request(**fields), service)
    whole: dict[str, Any] = json.loads(dump(answer.collect(answer.chunks(answer.start(service)))))
    return whole


@pytest.mark.parametrize(
    ("prompt", "ids", "texts"),
    [
        ("Hi", [[256, 72, 105]], ["Hi"]),
        (["Hi", "Ho"], [[256, 72, 105], [256, 72, 111]], ["Hi", "Ho"]),
        ([72, 105], [[72, 105]], ["Hi"]),
        ([[72, 105], [256, 72]], [[72, 105], [256, 72]], ["Hi", "H"]),
        ("", [[256]], [""]),
        ("a</s>", [[256, 97, 257]], ["a</s>"]),
    ],
)
def test_prompt_forms(service: FakeService, prompt: Any, ids: Any, texts: Any) -> None:
    prompts = completions.to_prompts(prompt, service)
    assert [p.ids for p in prompts] == ids
    assert [p.text for p in prompts] == texts


@pytest.mark.parametrize("prompt", [[], [[]], 5, {"a": 1}, [True], [["a"]], ["a", 1], [1.5], [300], [[-1]]])
def test_what_is_no_prompt(service: FakeService, prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completions.to_prompts(prompt, service)
    assert caught.value.param == "prompt"


def test_an_empty_prompt_without_bos_is_refused(service: FakeService) -> None:
    service.tokenizer.bos_id, service.tokenizer.add_bos = None, False
    with pytest.raises(RequestError):
        completions.to_prompts([""], service)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 9}, "best_of"),
        ({"best_of": 2, "echo": True}, "best_of"),
        ({"n": 0}, "n"),
    ],
)
def test_what_is_out_of_range_is_named(service: FakeService, fields: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completions.answer(request(**fields), service)
    assert caught.value.param == param


def test_sixteen_tokens_unless_told_otherwise(service: FakeService) -> None:
    assert completions.answer(request(), service).requests[0].params.max_tokens == 16
    service.defaults = dataclasses.replace(service.defaults, max_tokens=40)
    assert completions.answer(request(), service).requests[0].params.max_tokens == 40
    assert completions.answer(request(max_tokens=3), service).requests[0].params.max_tokens == 3
    both = request(max_tokens=3, max_completion_tokens=5)
    assert completions.answer(both, service).requests[0].params.max_tokens == 5


def test_choices_are_ordered_by_prompt_then_n(service: FakeService) -> None:
    service.engine.script = lambda r: bytes([r.prompt[-1], ord("0") + r.choice])
    whole = complete(service, prompt=["a", "b"], n=2)
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert whole["usage"]["prompt_tokens"] == 4
    assert whole["usage"]["completion_tokens"] == 12


def test_a_whole_answer_has_every_key(service: FakeService) -> None:
    service.engine.script = lambda r: b"yes"
    whole = complete(service)
    assert (whole["object"], whole["model"], whole["id"][:5]) == ("text_completion", service.model_id, "cmpl-")
    assert whole["choices"] == [{"index": 0, "text": "yes", "logprobs": None, "finish_reason": "stop"}]


def test_logprobs_have_one_entry_per_token_and_name_the_chosen_one(service: FakeService) -> None:
    service.engine.script = lambda r: "aé".encode()
    entry = complete(service, logprobs=2)["choices"][0]["logprobs"]
    assert entry["tokens"] == ["a", "\ufffd", "\ufffd"]
    assert entry["token_logprobs"] == [-0.25] * 3
    assert entry["top_logprobs"][0] == {"a": -0.25, "z": -9999.0}
    assert entry["text_offset"] == [0, 1, 2]


def test_scoring_a_text(service: FakeService) -> None:
    """What lm-evaluation-harness sends."""
    whole = complete(service, prompt=[[256, 72, 105]], max_tokens=0, echo=True, logprobs=1)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert choice["logprobs"] == {
        "tokens": ["<s>", "H", "i"],
        "token_logprobs": [None, -1.0, -1.0],
        "top_logprobs": [None, {"z": -0.5, "H": -1.0}, {"z": -0.5, "i": -1.0}],
        "text_offset": [0, 0, 1],
    }
    assert whole["usage"]["completion_tokens"] == 0


def test_echo_puts_the_prompt_first(service: FakeService) -> None:
    service.engine.script = lambda r: b"!!"
    choice = complete(service, prompt="Hi", echo=True, logprobs=0, max_tokens=1)["choices"][0]
    assert choice["text"] == "Hi!"
    assert choice["logprobs"]["tokens"] == ["<s>", "H", "i", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    assert choice["logprobs"]["top_logprobs"][3] == {"!": -0.25}
    assert complete(service, prompt="Hi", echo=True)["choices"][0]["text"] == "Hi!!"


def test_best_of_returns_the_likeliest(service: FakeService) -> None:
    texts = ["bad", "best", "good"]
    values = [-3.0, -0.1, -1.0]

    def events() -> list[TextEvent | None]:
        return [
            TextEvent(i, t, Usage(2, 1, 0), (TokenLogprob(t, t.encode(), 1, v),), finish="stop")
            for i, (t, v) in enumerate(zip(texts, values, strict=True))
        ]

    for logprobs in (None, 1):
        answer = completions.answer(request(n=2, best_of=3, logprobs=logprobs), service)
        assert len(answer.requests) == 3
        whole = json.loads(dump(answer.collect(answer.chunks(events()))))
        assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "best"), (1, "good")]
        assert (whole["choices"][0]["logprobs"] is None) == (logprobs is None)
        assert whole["usage"]["completion_tokens"] == 3


def test_a_stop_string_cuts_the_text_and_the_count(service: FakeService) -> None:
    service.engine.script = lambda r: b"one STOP two"
    whole = complete(service, stop="STOP", max_tokens=50)
    assert whole["choices"][0] == {"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop"}
    assert whole["usage"]["completion_tokens"] == 8


def test_half_a_stop_string_is_flushed_at_the_end(service: FakeService) -> None:
    service.engine.script = lambda r: b"one STO"
    assert complete(service, stop=["STOP"], max_tokens=50)["choices"][0]["text"] == "one STO"
    assert complete(service, stop=["STOP"], max_tokens=6)["choices"][0]["text"] == "one ST"


@given(st.lists(st.text(max_size=3), max_size=8), st.integers(0, 3), st.booleans(), st.booleans())
def test_whole_equals_streamed(pieces: list[str], n: int, logprobs: bool, echo: bool) -> None:
    service = FakeService()
    prompts = completions.to_prompts(["ab", "c"], service)
    events: list[TextEvent | None] = []
    for index in range(2 * (n + 1)):
        for count, piece in enumerate(pieces):
            entries = (TokenLogprob(piece, piece.encode(), 1, -0.5),) if piece else ()
            events += [None, TextEvent(index, piece, Usage(3, count + 1, 0), entries)]
        events.append(TextEvent(index, "", Usage(3, len(pieces) + 1, 0), finish="stop"))
    source = completions.Echo(prompts, service.tokenizer) if echo else None
    made = list(completions.chunks(events, head=HEAD, n=n + 1, logprobs=logprobs, include_usage=True, echo=source))
    sent = [json.loads(dump(chunk)) for chunk in made if chunk is not None]
    whole = json.loads(dump(completions.collect(made)))
    assert whole["usage"] == sent[-1]["usage"]
    for choice in whole["choices"]:
        parts = [c for chunk in sent for c in chunk["choices"] if c["index"] == choice["index"]]
        assert choice["text"] == "".join(part["text"] for part in parts)
        assert choice["text"].endswith("".join(pieces))
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [entry for part in parts if part["logprobs"] is not None for entry in part["logprobs"][name]]
            assert (choice["logprobs"][name] == joined) if logprobs else (choice["logprobs"] is None)
    assert len(whole["choices"]) == 2 * (n + 1)
