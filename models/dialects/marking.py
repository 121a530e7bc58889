"""Telling the template's own control tokens from the same characters typed by a user (invariant 8).

User data is left as it is. It is the template that is marked: every control token spelled in its literals is wrapped
in marks, characters that occur in no input of the request. In the rendered text a marked spelling is a control token
and everything else is text, whatever the template did to the user's strings (strip, split, replace, tojson, joining
two of them): no mark, no control token.

Some templates build a token from pieces, `'<|' + role + '|>'`. Such pieces get a second pair of marks, and only
tokens whose middle is a role or a literal of the template count. (A template that put them around a content would
let it choose among those.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from jinja2 import nodes

from errors import RequestError

if TYPE_CHECKING:
    from models.tokenizers import Tokenizer

# What marks are taken from: Unicode's noncharacters, then a private plane should someone send those.
MARK_POOL = (*range(0xFDD0, 0xFDF0), *range(0x10F000, 0x10FFFE))
ROLES = frozenset(
    {"system", "user", "assistant", "tool", "developer", "function", "ipython", "environment", "observation"}
)
# Methods whose arguments ask about a text instead of adding to it.
SEARCHES = frozenset(
    {"split", "rsplit", "startswith", "endswith", "find", "rfind", "index", "count", "strip", "lstrip", "rstrip"}
)

Marks = tuple[str, str, str, str]  # open and close a whole token, begin and end one in pieces


def strings_in(value: Any) -> Iterator[str]:
    """Every string of a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)


def choose_marks(inputs: Any, source: str = "") -> Marks:
    """Four characters that occur neither in the strings of `inputs` nor in the template `source`."""
    used = {ord(c) for text in chain([source], strings_in(inputs)) if not text.isascii() for c in set(text)}
    free = list(islice((chr(code) for code in MARK_POOL if code not in used), 4))
    if len(free) < 4:
        raise RequestError(
            "The messages use every private character that the server could use itself.", param="messages"
        )
    return free[0], free[1], free[2], free[3]


class Marking:
    """Marks a template's literals and reads the marks back from what it rendered."""

    def __init__(self, control_tokens: Mapping[str, int], marks: Marks) -> None:
        self._ids = control_tokens
        self._open, self._close, self._begin, self._end = marks
        spellings = sorted(filter(None, control_tokens), key=len, reverse=True)
        self._names = {token_id: spelling for spelling, token_id in control_tokens.items()}
        spelled = "|".join(map(re.escape, spellings)) if spellings else "(?!)"
        self._spelled = re.compile(spelled)
        self._spelled_start = re.compile(f"(?={spelled}).", re.DOTALL)
        any_mark = "".join(marks)
        token = f"([^{any_mark}]+)"
        self._marked = re.compile(self._open + token + self._close + "|" + self._begin + token + self._end)
        self._stray = re.compile(f"[{any_mark}]")
        self._assembled: set[str] = set()

    def mark(self, text: str) -> str:
        """`text` with every control token in it marked."""
        return self._spelled.sub(lambda found: f"{self._open}{found[0]}{self._close}", text)

    def mark_template(self, tree: nodes.Template) -> None:
        """Mark the literals of a parsed template in place; those that only search or compare stay as they are."""
        asked = {id(node) for node in _questions(tree)}
        consts = [n for n in tree.find_all(nodes.Const) if isinstance(n.value, str) and id(n) not in asked]
        data = list(tree.find_all(nodes.TemplateData))
        literals = {*(n.value for n in consts), *(n.data for n in data)}
        heads, tails = self._find_assembled(literals)
        for const in consts:
            const.value = self._mark_literal(const.value, heads, tails)
        for text in data:
            text.data = self._mark_literal(text.data, heads, tails)

    def _find_assembled(self, literals: set[str]) -> tuple[set[str], set[str]]:
        """Control tokens that literals can make around a role or another literal, by their first and last pieces."""
        heads, tails = set(), set()
        for token in self._ids:
            for middle in (word for word in ROLES | literals if word and word in token[1:-1]):
                head, tail = token.split(middle, 1)
                if head and tail and _any_end(literals, head) and _any_start(literals, tail):
                    self._assembled.add(token)
                    heads.add(head)
                    tails.add(tail)
        return heads, tails

    def _mark_literal(self, text: str, heads: set[str], tails: set[str]) -> str:
        head = max((h for h in heads if text.endswith(h)), key=len, default="")
        tail = max((t for t in tails if text.startswith(t)), key=len, default="")
        if len(head) + len(tail) > len(text):
            tail = ""
        middle = self.mark(text[len(tail) : len(text) - len(head)])
        return (tail + self._end if tail else "") + middle + (self._begin + head if head else "")

    def pieces(self, rendered: str) -> list[str | int]:
        """What the template wrote: ids of its control tokens, and the text between them without any mark."""
        pieces: list[str | int] = []
        start = 0
        for found in self._marked.finditer(rendered):
            token = found[1] if found[1] is not None else found[2]
            if token not in (self._ids if found[1] is not None else self._assembled):
                continue
            pieces += [self._stray.sub("", rendered[start : found.start()]), self._ids[token]]
            start = found.end()
        pieces.append(self._stray.sub("", rendered[start:]))
        return [piece for piece in pieces if piece != ""]

    def split(self, rendered: str, tokenizer: Tokenizer) -> list[str | int]:
        """`pieces` as the tokenizer itself splits them: some control tokens swallow the white space beside them."""
        pieces = self.pieces(rendered)
        mark = self._open  # one inside each spelling in the text keeps the tokenizer from taking it for the token
        text = "".join(
            self._names[piece] if isinstance(piece, int) else self._spelled_start.sub(f"\\g<0>{mark}", piece)
            for piece in pieces
        )
        again = [piece if isinstance(piece, int) else piece.replace(mark, "") for piece in tokenizer.split(text)]
        same = [p for p in again if isinstance(p, int)] == [p for p in pieces if isinstance(p, int)]
        return again if same else pieces


def _questions(tree: nodes.Template) -> Iterator[nodes.Node]:
    """Nodes that a template only compares with or looks up: `x == "..."`, `x["..."]`, `x.split("...")`."""
    roots: list[nodes.Node] = []
    for compare in tree.find_all(nodes.Compare):
        roots += [compare.expr, *(operand.expr for operand in compare.ops)]
    roots += [item.arg for item in tree.find_all(nodes.Getitem)]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in SEARCHES:
            roots += call.args
    for root in roots:
        yield root
        yield from root.find_all(nodes.Const)


def _any_end(literals: Iterable[str], head: str) -> bool:
    return any(text.endswith(head) for text in literals)


def _any_start(literals: Iterable[str], tail: str) -> bool:
    return any(text.startswith(tail) for text in literals)
