"""Incremental decoding equals decoding the whole, for any bytes cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tokenizers import Tokenizer
from models.tokenizers.incremental import IncrementalDecoder


class _Tokens:
    """A vocabulary of the given byte strings: token i is the i-th."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]


def _pushes(tokens: Sequence[bytes], **options: Any) -> list[str]:
    decoder = IncrementalDecoder(cast(Tokenizer, _Tokens(tokens)), **options)
    return [decoder.push(i) for i in range(len(tokens))] + [decoder.flush()]


def _cut(data: bytes) -> bytes:
    """`data` without an incomplete character at its end: a start that some continuation would make valid."""
    for size in range(1, 4):
        tail = data[-size:]
        if len(tail) < size:
            break
        for more in (b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xa0", b"\xa0\x80", b"\x90\x80\x80"):
            try:
                if len((tail + more).decode()) == 1 and tail[0] >= 0xC2:
                    return data[:-size]
            except UnicodeDecodeError:
                continue
    return data


_awkward = st.sampled_from(
    [b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe2\x82", b"\xac", b"\xc3", b"\xed", b"\xa0", b"\xff", b" ", b"a"]
)
_tokens = st.lists(
    st.one_of(_awkward, st.binary(max_size=4), st.text(max_size=2).map(lambda t: t.encode(errors="replace")))
)


@given(_tokens)
def test_joined_deltas_are_the_decoded_text_without_a_cut_character(tokens: list[bytes]) -> None:
    assert "".join(_pushes(tokens)) == _cut(b"".join(tokens)).decode("utf-8", "replace")


@given(_tokens)
def test_first_space_is_stripped_once(tokens: list[bytes]) -> None:
    whole = "".join(_pushes(tokens))
    assert "".join(_pushes(tokens, strip_first_space=True)) == whole.removeprefix(" ")


@given(st.lists(st.sampled_from([b"a", b" the", b"\n", b"{", b"12"]), min_size=1))
def test_ascii_tokens_come_one_by_one(tokens: list[bytes]) -> None:
    assert _pushes(tokens) == [token.decode() for token in tokens] + [""]


def test_a_character_comes_with_its_last_byte() -> None:
    assert _pushes([b"\xf0\x9f", b"\x98", b"\x80!", b"\xe6\x97"]) == ["", "", "😀!", "", ""]


@pytest.mark.parametrize(("token", "shown"), [(b"\xff", "�"), (b"\x80a", "�a"), (b"\xf0\x28", "�(")])
def test_impossible_bytes_show_at_once(token: bytes, shown: str) -> None:
    assert _pushes([token]) == [shown, ""]


def test_control_tokens_in_front_do_not_use_up_the_strip() -> None:
    assert _pushes([b"", b" ", b" a"], strip_first_space=True) == ["", "", " a", ""]
