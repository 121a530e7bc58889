"""tiktoken rank files with Llama 3's pattern and control tokens."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from errors import CheckpointError

several = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
_FRAGMENTS = ["hello", " the", "1234567", "\n\n", "😀", "<|eot_id|>", "<|begin_of_text|>", "'LL", " ", "\0", "é"]
texts = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(_FRAGMENTS), max_size=12).map("".join))


@pytest.fixture
def tokenizer(load: Any, ranks_bytes: bytes) -> Any:
    return load(tokenizer__model=ranks_bytes)


@pytest.fixture(scope="module")
def reference(ranks_bytes: bytes) -> tiktoken.Encoding:
    """Built as Meta's reference code does: control tokens inside tiktoken."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, ranks_bytes.splitlines())}
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    n = len(ranks)
    special = {"<|begin_of_text|>": n, "<|end_of_text|>": n + 1, "<|eot_id|>": n + 9}
    return tiktoken.Encoding("reference", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@several
@given(text=texts)
def test_ids_equal_tiktoken(tokenizer: Any, reference: tiktoken.Encoding, text: str) -> None:
    assert tokenizer.encode(text) == reference.encode_ordinary(text)
    assert tokenizer.encode(text, special=True) == reference.encode(text, allowed_special="all")


@several
@given(text=texts)
def test_text_comes_back_and_holds_no_control_tokens(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert set(tokenizer.special_tokens.values()).isdisjoint(ids)


def test_control_tokens_follow_the_ranks_in_metas_order(tokenizer: Any) -> None:
    n = 268
    assert tokenizer.vocab_size == n + 256 and len(tokenizer.special_tokens) == 256
    names = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|finetune_right_pad_id|>": 4, "<|start_header_id|>": 6}
    names |= {"<|end_header_id|>": 7, "<|eom_id|>": 8, "<|eot_id|>": 9, "<|python_tag|>": 10}
    names |= {
        "<|reserved_special_token_1|>": 3,
        "<|reserved_special_token_2|>": 11,
        "<|reserved_special_token_246|>": 255,
    }
    assert {name: tokenizer.special_tokens[name] - n for name in names} == names
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.stop_ids) == (n, True, {n + 1, n + 8, n + 9})
    assert not tokenizer.strips_first_space
    assert tokenizer.token_text(n + 9) == "<|eot_id|>" and tokenizer.token_bytes(n + 9) == b""


def test_emoji_over_tokens(tokenizer: Any) -> None:
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("😀")] == [b"\xf0\x9f\x98", b"\x80"]


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (b"YQ== 0\nYg== 2\n", "line 2 has rank 2, expected 1"),
        (b"YQ== 0\nnot base64!\n", "line 2 is not a base64 token and its rank"),
        (b"YQ== 0\nYg== 1\n", "254 byte values without a token"),
    ],
)
def test_broken_rank_files_are_named(load: Any, ranks: bytes, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        load(tokenizer__model=ranks)
