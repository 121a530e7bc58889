"""From a request's bytes to a checked dataclass and complete sampling parameters."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from api.service import Service
from api.types import SamplingFields, adapter
from engine.types import SamplingParams
from errors import RequestError

T = TypeVar("T", bound=SamplingFields)

MAX_CHOICES = 128  # the specification's upper bound of n


def _unless(*harmless: Any) -> Callable[[Any], bool]:
    """Whether a field's value asks for something: anything but one of the `harmless` ones (True is not 1 here)."""
    return lambda value: not any(value == each and type(value) is type(each) for each in harmless)


# Fields that other servers know and that would change the answer, with a test for the values that do. Those are
# refused by name; everything else that a request doesn't declare is ignored.
UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    # tools and structured output
    "tools": _unless([]),
    "tool_choice": _unless("none", "auto"),
    "functions": _unless([]),
    "function_call": _unless("none", "auto"),
    "response_format": lambda value: not (isinstance(value, dict) and value.get("type") == "text"),
    "structured_outputs": _unless({}),
    "guided_json": _unless(),
    "guided_regex": _unless(),
    "guided_choice": _unless(),
    "guided_grammar": _unless(),
    "json_schema": _unless({}),
    "grammar": _unless(""),
    # other media and sources
    "modalities": _unless(["text"], []),
    "web_search_options": _unless(),
    # prompts
    "suffix": _unless(""),
    "continue_final_message": _unless(False),
    "add_generation_prompt": _unless(True),
    "documents": _unless([]),
    "chat_template": _unless(),
    "truncate_prompt_tokens": _unless(),
    "prompt_logprobs": _unless(),
    # sampling
    "use_beam_search": _unless(False),
    "typical_p": _unless(1, 1.0),
    "mirostat": _unless(0),
    "dry_multiplier": _unless(0, 0.0),
    "xtc_probability": _unless(0, 0.0),
    "no_repeat_ngram_size": _unless(0),
    "bad_words": _unless([]),
    "allowed_token_ids": _unless(),
    # what the text shows
    "include_stop_str_in_output": _unless(False),
    "skip_special_tokens": _unless(True),
}
# Declared by one route's request, refused by the other's.
OF_ONE_ROUTE: Mapping[str, Callable[[Any], bool]] = {"echo": _unless(False), "best_of": _unless(1)}


def decode(body: bytes, kind: type[T]) -> T:
    """A request body as a `kind`. null fields count as absent. Raises RequestError naming the field."""
    try:
        fields = from_json(body.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:  # lone surrogates and broken UTF-8 included
        raise RequestError(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise RequestError("The request body must be a JSON object.")
    fields = {name: value for name, value in fields.items() if value is not None}
    refuse_unsupported(fields, declared={f.name for f in dataclasses.fields(kind)})
    try:
        request: T = adapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = _path(first["loc"])
        raise RequestError(f"{param}: {first['msg']}.", param=param) from None
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
    return request


def refuse_unsupported(fields: Mapping[str, Any], *, declared: Collection[str] = ()) -> None:
    """Raises RequestError for the first field that would change the answer in a way this server can't."""
    unused = set()
    for offered, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if fields.get(choice) == "none":
            unused.add(offered)
    for name, changes in {**UNSUPPORTED, **OF_ONE_ROUTE}.items():
        if name in fields and name not in declared and name not in unused and changes(fields[name]):
            raise RequestError(f"{name} is not supported by this server.", param=name)


def _path(loc: tuple[int | str, ...]) -> str:
    """A field's place as people write it: messages[0].content."""
    path = ""
    for step in loc:
        if step != "[key]":  # pydantic's mark for "the key itself"
            path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


# --- sampling parameters

# The request's fields that are sampling parameters by the same name and meaning.
_SAME = {f.name for f in dataclasses.fields(SamplingParams)} & {f.name for f in dataclasses.fields(SamplingFields)}


def sampling(request: SamplingFields, service: Service, *, logprobs: int | None) -> SamplingParams:
    """The request's sampling parameters over the server's defaults, complete and in range. Raises RequestError."""
    given = SamplingParams(**{name: getattr(request, name) for name in _SAME}, logprobs=logprobs)
    if request.max_completion_tokens is not None:
        _at_least_one("max_completion_tokens", request.max_completion_tokens)
        given = dataclasses.replace(given, max_tokens=request.max_completion_tokens)
    given.validate()
    for name, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
        check_ids(name, ids if ids is not None else (), service)
    params = given.over(service.defaults)
    if request.stop_token_ids is not None:  # besides the model's own, which the engine knows
        params = dataclasses.replace(params, stop_ids=params.stop_ids | frozenset(request.stop_token_ids))
    return dataclasses.replace(params, seed=None if params.seed == -1 else params.seed)


def check_ids(name: str, ids: Collection[int], service: Service) -> None:
    """Raises RequestError for an id outside the vocabulary."""
    size = service.tokenizer.vocab_size
    for token_id in ids:
        if not 0 <= token_id < size:
            raise RequestError(f"{name}: {token_id} is no token id; they go from 0 to {size - 1}.", param=name)


def choices(request: SamplingFields, service: Service, name: str = "n") -> int:
    """How many choices per prompt: `name` is the field that says so. Raises RequestError."""
    wanted = getattr(request, name)
    if wanted is None:
        return 1
    limit = min(MAX_CHOICES, service.max_choices)
    if not 1 <= wanted <= limit:
        raise RequestError(f"{name} must be between 1 and {limit} here, got {wanted}.", param=name)
    return int(wanted)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise RequestError(f"{name} must be at least 1, got {value}.", param=name)


def require_tokens(request: SamplingFields) -> None:
    """Raises RequestError if max_tokens asks for nothing."""
    if request.max_tokens is not None:
        _at_least_one("max_tokens", request.max_tokens)
