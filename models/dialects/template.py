"""A dialect written by a jinja template, in a sandbox, the way Hugging Face's apply_chat_template runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes, pass_context
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.ext import Extension, loopcontrols
from jinja2.optimizer import optimize
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import CheckpointError, RequestError
from models.dialects.marking import Marking, Marks, choose_marks

if TYPE_CHECKING:
    from models.dialects import Message
    from models.tokenizers import Tokenizer

# A template that goes beyond these has run away: no conversation that fits a context comes near them.
MAX_ITERATIONS = 1_000_000
MAX_CHARACTERS = 1 << 25
STEPS = "_steps"  # name of the render's step counter among the template's variables


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template's text and the file it came from, for messages."""

    text: str
    origin: str


class Refusal(TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks training data in Hugging Face templates; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox; `x * n` besides can't make texts or lists of unbounded size."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for value, count in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, (str, list, tuple)) and isinstance(count, int):
                _limit(len(value) * count, MAX_CHARACTERS)
        if operator == "**" and isinstance(right, int):
            _limit(right, 64)
        return super().call_binop(context, operator, left, right)


def _limit(size: int, most: int) -> None:
    if size > most:
        raise SecurityError("it does not end, or writes without end")


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's tojson: plain JSON, no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context
def _counted(context: Context, items: Any) -> Iterator[Any]:
    """`items`, each counted as a step of this render: every loop of a template goes through here."""
    steps = context[STEPS]
    for item in items:
        steps[0] += 1
        _limit(steps[0], MAX_ITERATIONS)
        yield item


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters |= {"tojson": _tojson, "_counted": _counted}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class _Compiled:
    """One template compiled with one set of marks."""

    def __init__(self, source: TemplateSource, control_tokens: Mapping[str, int], marks: Marks) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source.text)
            self.reads_tools = "tools" in meta.find_undeclared_variables(tree)
            optimize(tree, environment)  # joins constants in place, so that '<|' + 'end|>' is seen whole
            self._marking = Marking(control_tokens, marks)
            self._marking.mark_template(tree)
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
            code = environment.compile(tree)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                source.origin, f"line {error.lineno} of the chat template: {error.message}"
            ) from error
        except RecursionError as error:
            raise CheckpointError(source.origin, "the chat template is nested too deeply") from error
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))

    def render(self, tokenizer: Tokenizer, names: Mapping[str, str], variables: Mapping[str, Any]) -> list[str | int]:
        """A prompt's pieces, see Tokenizer.split. `names` are special tokens' spellings (bos_token, ...).

        Raises RequestError.
        """
        marked = {name: self._marking.mark(spelling) for name, spelling in names.items()}
        written: list[str] = []
        size = 0
        try:
            for text in self._template.generate({**marked, **variables, STEPS: [0]}):
                size += len(text)
                _limit(size, MAX_CHARACTERS)
                written.append(text)
        except Refusal as error:
            raise RequestError(str(error), param="messages") from error
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:
            # a template is a program that gets input its writer didn't think of: any error of its own is the request's
            what = error.message if isinstance(error, (UndefinedError, SecurityError)) else str(error)
            raise RequestError(f"The chat template can't write these messages: {what}", param="messages") from error
        return self._marking.split("".join(written), tokenizer)


class TemplateDialect:
    """Writes prompts with a chat template; `tool_template`, where a checkpoint has one, when tools are given."""

    is_chat = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: TemplateSource,
        tool_template: TemplateSource | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: the special tokens a template may write by name (bos_token, eos_token, ...). Raises CheckpointError
        naming file and line for a template that can't be compiled."""
        self._tokenizer = tokenizer
        self._names = {} if names is None else dict(names)
        self._write = self._compiled(template)
        self._write_tools = self._write if tool_template is None else self._compiled(tool_template)

    def _compiled(self, source: TemplateSource) -> Callable[[Any], _Compiled]:
        """Compiles once, and again only for inputs that contain the marks themselves."""
        control_tokens = self._tokenizer.special_tokens
        usual = choose_marks(None, source.text)
        compiled = _Compiled(source, control_tokens, usual)

        def for_inputs(inputs: Any) -> _Compiled:
            marks = choose_marks(inputs, source.text)
            return compiled if marks == usual else _Compiled(source, control_tokens, marks)

        return for_inputs

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """See Dialect.render."""
        plain = [_plain(message) for message in messages]
        template = (self._write_tools if tools else self._write)([plain, tools, template_kwargs])
        if tools and not template.reads_tools:
            raise RequestError("This model's chat template does not take tools.", param="tools")
        variables: dict[str, Any] = {"add_generation_prompt": True, "documents": None, **template_kwargs}
        variables |= {"messages": plain, "tools": list(tools) if tools else None}
        try:
            pieces = template.render(self._tokenizer, self._names, variables)
        except RequestError:
            if all("content" in message for message in plain):
                raise
            # templates without tools rarely think of a message without content
            filled = [{"content": "", **message} for message in plain]
            pieces = template.render(self._tokenizer, self._names, variables | {"messages": filled})
        return self._encode(pieces)

    def _encode(self, pieces: list[str | int]) -> list[int]:
        bos = self._tokenizer.bos_id
        first = next((piece for piece in pieces if isinstance(piece, int)), None)
        if self._tokenizer.add_bos and bos is not None and first != bos:
            pieces = [bos, *pieces]
        ids = self._tokenizer.encode_pieces(pieces)
        if not ids:
            raise RequestError("The messages give an empty prompt.", param="messages")
        return ids


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: absent instead of None, a tool call's arguments as an object."""
    plain = {key: value for key, value in message.items() if value is not None}
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call) for call in plain["tool_calls"]]
    return plain


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The wire carries arguments as JSON text; templates write them with tojson, which would quote a text again."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"]) if function["arguments"] else {}
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
