"""Byte-level BPE vocabularies inside GGUF: the rebuilt tokenizer equals the original."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from errors import CheckpointError

several = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
_FRAGMENTS = [
    "the",
    " dog",
    "  ",
    "\n",
    "\r\n",
    "1234",
    "'ll",
    "'LL",
    "é",
    "日本",
    "😀",
    "<|im_end|>",
    "<think>",
    "\0",
    "!?\n",
]
texts = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(_FRAGMENTS), max_size=12).map("".join))

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(splits)


# As the models' own tokenizer.json files write them.
ORIGINALS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_LLAMA3.replace("{1,3}", "")),
}


def _metadata(full: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """What a converter writes into GGUF."""
    size = full.get_vocab_size()
    added = full.get_added_tokens_decoder()
    merges = json.loads(full.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [full.id_to_token(i) for i in range(size)],
        "tokenizer.ggml.token_type": [(3 if added[i].special else 4) if i in added else 1 for i in range(size)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(params=sorted(ORIGINALS))
def pre(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def original(pre: str, trained_bpe: Any) -> tokenizers.Tokenizer:
    full: tokenizers.Tokenizer = trained_bpe(ORIGINALS[pre])
    if pre == "qwen2":
        full.normalizer = tokenizers.normalizers.NFC()
    return full


@pytest.fixture
def tokenizer(load: Any, pre: str, original: tokenizers.Tokenizer) -> Any:
    return load(_metadata(original, pre))


@several
@given(text=texts)
def test_ids_and_text_equal_the_original(tokenizer: Any, original: tokenizers.Tokenizer, text: str) -> None:
    ids = original.encode(text).ids
    assert tokenizer.encode(text, special=True) == ids
    assert tokenizer.decode(ids) == original.decode(ids)


@several
@given(text=texts)
def test_plain_text_never_becomes_a_control_token(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(f"<|im_end|>{text}<|im_start|>")
    assert {0, 1, 2}.isdisjoint(ids)
    assert tokenizer.decode(ids).startswith("<|im_end|>")


def test_facts(tokenizer: Any, original: tokenizers.Tokenizer, pre: str) -> None:
    assert tokenizer.vocab_size == original.get_vocab_size()
    assert tokenizer.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.stop_ids == {0, 2} and tokenizer.bos_id == 1
    assert tokenizer.add_bos == (pre == "llama-bpe")
    thinking = original.token_to_id("<think>")
    assert thinking in tokenizer.encode("a<think>b") and tokenizer.token_bytes(thinking) == b"<think>"


def test_bos_and_end_tokens_are_control_tokens_whatever_their_type(load: Any, trained_bpe: Any) -> None:
    metadata = _metadata(trained_bpe(ORIGINALS["gpt-2"]), "gpt-2")
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = load(metadata | {"tokenizer.ggml.eot_token_id": 0})
    assert tokenizer.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert {0, 1, 2}.isdisjoint(tokenizer.encode("<|im_start|><|im_end|>"))


def test_a_whole_word_wins_over_merges_for_llama3_only(load: Any, trained_bpe: Any) -> None:
    metadata = _metadata(trained_bpe(ORIGINALS["gpt-2"]), "gpt-2")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "qqq"]  # no merge makes it
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    size = len(metadata["tokenizer.ggml.tokens"])
    assert len(load(metadata).encode("qqq")) == 3
    assert load(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("qqq") == [size - 1]


def test_every_known_pre_tokenizer_splits_and_comes_back(load: Any, trained_bpe: Any) -> None:
    from models.tokenizers.pretokenizers import _PATTERNS

    text = "I'll pay 12345 Ωmega dollars;  日本語 한국어 «ça» \r\n\tdef f(x): return x!?\n\n  😀 end "
    metadata = _metadata(trained_bpe(ORIGINALS["gpt-2"]), "gpt-2")
    for name in _PATTERNS:
        tokenizer = load(metadata | {"tokenizer.ggml.pre": name})
        assert tokenizer.decode(tokenizer.encode(text)) == text, name


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, r"tokenizer\.ggml\.pre is 'klingon'"),
        ({"tokenizer.ggml.model": "t5"}, r"tokenizer\.ggml\.model is 't5': expected 'gpt2'"),
        ({"tokenizer.ggml.token_type": [1]}, r"tokenizer\.ggml\.token_type has 1 entries, expected 4"),
        ({"tokenizer.ggml.merges": ["no where"]}, r"tokenizer\.ggml\.merges do not fit tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing"),
    ],
)
def test_broken_vocabularies_are_named(load: Any, trained_bpe: Any, change: dict[str, Any], problem: str) -> None:
    metadata = _metadata(trained_bpe(ORIGINALS["gpt-2"]), "gpt-2")
    with pytest.raises(CheckpointError, match=problem):
        load(metadata | change)


@pytest.mark.slow
def test_smollm2_control_tokens_stops_and_chat(smollm2_path: Any) -> None:
    from models.checkpoints import open_checkpoint
    from models.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(smollm2_path))
    assert (tokenizer.vocab_size, tokenizer.stop_ids, tokenizer.add_bos) == (49152, {0, 2}, False)
    prompt = "<|im_start|>user\nHi <|im_end|>\n"
    assert tokenizer.encode(prompt, special=True) == [1, 4093, 198, 26843, 216, 2, 198]
    assert {1, 2}.isdisjoint(tokenizer.encode(prompt)) and tokenizer.decode(tokenizer.encode(prompt)) == prompt
