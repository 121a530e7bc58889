from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from api.types import CompletionRequest, TextCompletionRequest
from api.validation import OF_ONE_ROUTE, UNSUPPORTED, decode
from errors import RequestError

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"messages": MESSAGES, **fields}).encode(), CompletionRequest)


def refused(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(body, CompletionRequest)
    assert caught.value.status == 400
    return caught.value


def test_every_optional_field_may_be_null() -> None:
    names = [f.name for f in dataclasses.fields(CompletionRequest) if f.name != "messages"]
    assert chat(**dict.fromkeys(names)) == chat()
    assert chat(**dict.fromkeys([*UNSUPPORTED, *OF_ONE_ROUTE])) == chat()


@pytest.mark.parametrize(
    ("given", "meant"), [(True, True), (False, False), ("true", True), ("False", False), ("TRUE", True), (None, None)]
)
def test_stream_as_people_write_it(given: Any, meant: Any) -> None:
    assert chat(stream=given).stream is meant


@pytest.mark.parametrize("given", ["yes", "", 1, 0, "1", []])
def test_stream_as_nothing_else(given: Any) -> None:
    assert refused(json.dumps({"messages": MESSAGES, "stream": given}).encode()).param == "stream"


@pytest.mark.parametrize(
    ("given", "meant"),
    [(None, None), ("", []), ([], []), ("a", ["a"]), (["a", "", "b"], ["a", "b"]), (list("abcdef"), list("abcdef"))],
)
def test_stop_in_its_forms(given: Any, meant: Any) -> None:
    assert chat(stop=given).stop == meant


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"seed": False}, "seed"),
        ({"n": "2"}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"model": 5}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "wizard", "content": "Hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content"),
        ({"logit_bias": {"one": 1}}, "logit_bias.one"),
        ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": True}, "top_logprobs"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": 10**400}, "temperature"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_the_wrong_type_is_named(fields: Any, param: str) -> None:
    error = refused(json.dumps({"messages": MESSAGES, **fields}).encode())
    assert error.param == param
    assert "\n" not in error.message


def test_media_parts_are_named() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    error = refused(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
    assert error.param == "messages[0].content"
    assert "image_url" in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"messages"',
        b"{'messages': []}",
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"messages": [{"role": "user", "content": "\\udc00 tail"}]}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "user": "\\ud83d"}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "\\ud83d": 1}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert refused(body).type == "invalid_request_error"


def test_paired_surrogates_and_a_byte_order_mark_are_fine() -> None:
    body = b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert decode(body, CompletionRequest).messages[0].content == "\U0001f600"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function"}], "tool_choice": "auto"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}},
        {"response_format": "json"},
        {"guided_json": {}},
        {"guided_regex": "a"},
        {"guided_choice": ["a"]},
        {"guided_grammar": "root"},
        {"structured_outputs": {"json": {}}},
        {"modalities": ["text", "audio"]},
        {"echo": True},
        {"best_of": 2},
        {"use_beam_search": True},
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: Any) -> None:
    error = refused(json.dumps({"messages": MESSAGES, **fields}).encode())
    assert error.param == next(iter(fields))
    assert next(iter(fields)) in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"echo": False, "best_of": 1, "suffix": ""},
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"},
        {"safety_identifier": "s", "verbosity": "low", "prediction": {"type": "content", "content": "x"}},
        {"parallel_tool_calls": True, "never_heard_of_it": [1]},
    ],
)
def test_what_would_not_is_ignored(fields: Any) -> None:
    assert chat(**fields) == chat()


def test_suffix_is_refused_in_completions() -> None:
    with pytest.raises(RequestError) as caught:
        decode(b'{"prompt": "a", "suffix": "b"}', TextCompletionRequest)
    assert caught.value.param == "suffix"


def test_the_prompt_is_required() -> None:
    with pytest.raises(RequestError) as caught:
        decode(b'{"prompt": null}', TextCompletionRequest)
    assert caught.value.param == "prompt"
