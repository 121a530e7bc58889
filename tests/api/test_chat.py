from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import chat
from api.answer import Head
from api.types import CompletionRequest, dump
from api.validation import decode
from engine.types import Usage
from errors import EngineError, RequestError, UnavailableError
from models.dialects.decode import TextEvent, TokenLogprob
from tests.api.fakes import FakeService

HEAD = Head("chatcmpl-1", 5, "M", "fp_x")


def request(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode(), CompletionRequest)


def chunks(events: list[TextEvent | None], **options: Any) -> list[dict[str, Any]]:
    made = chat.chunks(events, **({"head": HEAD, "n": 1, "logprobs": False, "include_usage": False} | options))
    return [json.loads(dump(chunk)) for chunk in made if chunk is not None]


def test_the_stream_is_the_specification_to_the_byte() -> None:
    events = [TextEvent(0, "Hel", Usage(3, 1, 0)), None, TextEvent(0, "", Usage(3, 2, 0), finish="stop")]
    made = chat.chunks(events, head=HEAD, n=1, logprobs=False, include_usage=False)
    start = (
        '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"M","system_fingerprint":"fp_x",'
        '"choices":[{"index":0,"delta":'
    )
    assert [dump(chunk).decode() for chunk in made if chunk is not None] == [
        start + '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        start + '{"content":"Hel"},"logprobs":null,"finish_reason":null}]}',
        start + '{},"logprobs":null,"finish_reason":"stop"}]}',
    ]


def test_usage_comes_last_with_no_choices_and_is_null_before() -> None:
    events = [TextEvent(0, "a", Usage(3, 1, 2)), TextEvent(0, "", Usage(3, 2, 2), finish="length")]
    *before, last = chunks(events, include_usage=True)
    assert [chunk["usage"] for chunk in before] == [None, None, None]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_text_released_by_the_end_comes_before_the_finish_chunk() -> None:
    made = chunks([TextEvent(0, "half", Usage(1, 4, 0), finish="length")])
    assert [chunk["choices"][0]["delta"] for chunk in made] == [
        {"role": "assistant", "content": ""},
        {"content": "half"},
        {},
    ]


def test_a_prompt_counts_once_for_all_its_choices() -> None:
    events = [TextEvent(i, "x", Usage(10, 2, 4 * i), finish="stop") for i in (1, 0, 2)]
    usage = chunks(events, n=3, include_usage=True)[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 6)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_logprobs_travel_with_their_text_and_are_finite() -> None:
    top = (TokenLogprob("a", b"a", 97, -0.1), TokenLogprob("b", b"b", 98, float("-inf")))
    entry = TokenLogprob("a", b"a", 97, float("nan"), top)
    made = chunks(
        [TextEvent(0, "a", Usage(1, 1, 0), (entry,)), TextEvent(0, "", Usage(1, 2, 0), finish="stop")], logprobs=True
    )
    role, text, end = (chunk["choices"][0]["logprobs"] for chunk in made)
    assert role == {"content": [], "refusal": None}
    assert text["content"] == [
        {
            "token": "a",
            "logprob": -9999.0,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.1, "bytes": [97]},
                {"token": "b", "logprob": -9999.0, "bytes": [98]},
            ],
        }
    ]
    assert end is None


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (TextEvent(0, "", Usage(1, 1, 0), finish="error", error=EngineError("broke")), EngineError),
        (TextEvent(0, "", Usage(1, 1, 0), finish="cancelled"), UnavailableError),
    ],
)
def test_a_choice_that_fails_ends_the_stream_with_an_error(event: TextEvent, error: type[Exception]) -> None:
    made = chat.chunks([TextEvent(0, "a", Usage(1, 1, 0)), event], head=HEAD, n=1, logprobs=False, include_usage=True)
    with pytest.raises(error):
        list(made)


@st.composite
def streams(draw: st.DrawFn) -> list[TextEvent | None]:
    """Events of up to three choices, interleaved, with ticks."""
    choices = draw(st.integers(1, 3))
    texts = [draw(st.lists(st.text(max_size=4), max_size=6)) for _ in range(choices)]
    finishes = [draw(st.sampled_from(["stop", "length"])) for _ in range(choices)]
    order = draw(st.permutations([i for i in range(choices) for _ in range(len(texts[i]) + 1)]))
    events: list[TextEvent | None] = []
    count = [0] * choices
    for i in order:
        last = count[i] == len(texts[i])
        piece = "" if last else texts[i][count[i]]
        count[i] += 1
        entries = (TokenLogprob(piece, piece.encode(), 1, -0.5),) if piece else ()
        events += [None, TextEvent(i, piece, Usage(4, count[i], 1), entries, finish=finishes[i] if last else None)]
    return events


@given(streams(), st.booleans())
def test_whole_equals_streamed(events: list[TextEvent | None], logprobs: bool) -> None:
    n = 1 + max(event.choice for event in events if event is not None)
    made = list(chat.chunks(events, head=HEAD, n=n, logprobs=logprobs, include_usage=True))
    whole = json.loads(dump(chat.collect(made)))
    sent = [json.loads(dump(chunk)) for chunk in made if chunk is not None]
    assert whole["usage"] == sent[-1]["usage"]
    assert [choice["index"] for choice in whole["choices"]] == list(range(n))
    for choice in whole["choices"]:
        parts = [c for chunk in sent for c in chunk["choices"] if c["index"] == choice["index"]]
        assert choice["message"]["content"] == "".join(part["delta"].get("content", "") for part in parts)
        assert [part["finish_reason"] for part in parts if part["finish_reason"] is not None] == [
            choice["finish_reason"]
        ]
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        entries = [e for part in parts if part["logprobs"] is not None for e in part["logprobs"]["content"]]
        assert choice["logprobs"] == ({"content": entries, "refusal": None} if logprobs else None)


def test_a_whole_answer_has_every_key_in_order() -> None:
    made = chat.chunks(
        [TextEvent(0, "a", Usage(1, 1, 0), finish="stop")], head=HEAD, n=1, logprobs=False, include_usage=True
    )
    whole = json.loads(dump(chat.collect(made)))
    assert list(whole) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "a", "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]


# --- requests


def test_each_choice_is_one_request(service: FakeService) -> None:
    made = chat.to_requests(request(n=3, seed=7, temperature=0, logprobs=True, top_logprobs=2), service)
    assert [r.choice for r in made] == [0, 1, 2]
    assert {r.params.seed for r in made} == {7}
    assert made[0].params.logprobs == 2
    assert made[0].params.temperature == 0
    assert made[0].params.stop_ids == frozenset()  # the engine knows the model's own, which ignore_eos is about
    assert made[0].params.max_tokens is None
    assert made[0].prompt == service.tokenizer.encode("user:Hi\n", bos=True)


def test_max_completion_tokens_wins(service: FakeService) -> None:
    assert chat.to_requests(request(max_tokens=5, max_completion_tokens=9), service)[0].params.max_tokens == 9
    assert chat.to_requests(request(max_tokens=5), service)[0].params.max_tokens == 5


def test_roles_and_contents_reach_the_template(service: FakeService) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "function", "content": "2", "name": "f"},
        {"role": "assistant", "content": None},
    ]
    chat.to_requests(request(messages=messages), service)
    assert service.dialect.rendered[0][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "tool", "content": "2", "name": "f"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": None, "reasoning_effort": None}, {}),
    ],
)
def test_template_options_reach_the_template(service: FakeService, fields: Any, kwargs: Any) -> None:
    chat.to_requests(request(**fields), service)
    assert service.dialect.rendered[0][1] == kwargs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_what_is_out_of_range_is_named(service: FakeService, fields: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat.to_requests(request(**fields), service)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e-5},
        {"temperature": 2},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"seed": 0},
        {"seed": -7},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"top_k": -1},
        {"n": 8},
        {"max_tokens": 10**9},
        {"max_tokens": 5.0},
        {"logit_bias": {"0": -100, "257": 100}},
        {"logit_bias": {}},
        {"logprobs": True},
        {"logprobs": False, "top_logprobs": 0},
        {"ignore_eos": True, "min_tokens": 3},
    ],
)
def test_what_is_in_range_passes(service: FakeService, fields: Any) -> None:
    params = chat.to_requests(request(**fields), service)[0].params
    for name in fields.keys() - {"n", "logprobs", "top_logprobs", "logit_bias"}:
        assert getattr(params, name) == fields[name]


def test_seed_minus_one_is_random_whatever_the_server_says(service: FakeService) -> None:
    service.defaults = dataclasses.replace(service.defaults, seed=3, temperature=0.25)
    assert chat.to_requests(request(seed=-1), service)[0].params.seed is None
    params = chat.to_requests(request(), service)[0].params
    assert (params.seed, params.temperature) == (3, 0.25)


def test_a_foreign_model_is_answered_unless_strict(service: FakeService) -> None:
    chat.to_requests(request(model="gpt-4o"), service)
    service.strict_model = True
    chat.to_requests(request(model=service.model_id), service)
    chat.to_requests(request(model=None), service)
    with pytest.raises(RequestError) as caught:
        chat.to_requests(request(model="gpt-4o"), service)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
