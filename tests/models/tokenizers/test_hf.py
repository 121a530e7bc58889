"""tokenizer.json: equal to the library itself, and safe where the library alone is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from errors import CheckpointError

several = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
_FRAGMENTS = [
    "the",
    " dog",
    "  ",
    "\n",
    "12",
    "'ll",
    "é",
    "日本",
    "😀",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<think>",
    "\0",
    "▁",
]
texts = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(_FRAGMENTS), max_size=12).map("".join))


def _byte_level(trained_bpe: Callable[[Any], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    return trained_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))


def _metaspace(scheme: str) -> tokenizers.Tokenizer:
    """A Llama-like BPE of the given prepend_scheme, by hand: bytes, characters, a few merges."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{value:02X}>": 3 + value for value in range(256)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "g"), ("▁", "d"), ("▁d", "og"), ("<", "s"), ("<s", ">")]
    for piece in [*"▁thedogs<>/|.", *(left + right for left, right in merges)]:
        vocab.setdefault(piece, len(vocab))
    full = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    full.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    full.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    full.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    full.add_tokens([AddedToken("<think>", normalized=False)])
    full.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return full


KINDS = ["byte-level", "first", "always", "never"]


@pytest.fixture(params=KINDS)
def reference(request: pytest.FixtureRequest, trained_bpe: Any) -> tokenizers.Tokenizer:
    return _byte_level(trained_bpe) if request.param == "byte-level" else _metaspace(request.param)


@pytest.fixture
def tokenizer(load: Any, reference: tokenizers.Tokenizer) -> Any:
    return load(tokenizer__json=reference.to_str())


@several
@given(text=texts)
def test_ids_equal_the_library_where_control_tokens_are_meant(tokenizer: Any, reference: Any, text: str) -> None:
    assert tokenizer.encode(text, special=True) == reference.encode(text, add_special_tokens=False).ids


@several
@given(text=texts)
def test_plain_text_equals_the_library_and_holds_no_control_tokens(tokenizer: Any, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert set(tokenizer.special_tokens.values()).isdisjoint(ids)
    if not any(name in text for name in tokenizer.special_tokens):
        assert ids == reference.encode(text, add_special_tokens=False).ids


@several
@given(text=texts)
def test_text_comes_back(tokenizer: Any, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    space = " " if tokenizer.strips_first_space else ""
    assert tokenizer.decode(ids).removeprefix(space) == reference.decode(ids, skip_special_tokens=False)
    if not tokenizer.strips_first_space:  # the others lose or gain spaces at the start and after <think>
        assert tokenizer.decode(ids) == (
            text if isinstance(reference.decoder, decoders.ByteLevel) else text.replace("▁", " ")
        )


def test_every_control_token_typed_by_a_user_is_text(tokenizer: Any) -> None:
    for name, token_id in tokenizer.special_tokens.items():
        ids = tokenizer.encode(f"the {name} dog")
        assert token_id not in ids and name in tokenizer.decode(ids)
        assert tokenizer.encode(name, special=True) == [token_id]


def test_control_token_that_merges_can_make_is_spelled_out(load: Any) -> None:
    """The vocabulary merges `<`, `s`, `>` to `<s>`: the library alone would write BOS."""
    tokenizer = load(tokenizer__json=_metaspace("never").to_str())
    assert [tokenizer.token_text(i) for i in tokenizer.encode("the<s>")][-3:] == ["<", "s", ">"]


def test_added_tokens_are_text(tokenizer: Any) -> None:
    (thinking,) = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"<think>"]
    assert thinking in tokenizer.encode("<think>") and "<think>" not in tokenizer.special_tokens


def test_first_space_and_bos(load: Any) -> None:
    tokenizer = load(tokenizer__json=_metaspace("first").to_str())
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.strips_first_space) == (1, True, True)
    assert tokenizer.encode("the dog", bos=True) == _metaspace("first").encode("the dog").ids
    never = load(tokenizer__json=_metaspace("never").to_str())
    assert not never.strips_first_space


def test_tokenizer_config_names_control_tokens(load: Any, trained_bpe: Any) -> None:
    full = _byte_level(trained_bpe)
    full.add_tokens([AddedToken("<|tool|>", normalized=False), AddedToken("<|end|>", normalized=False)])
    config = {
        "bos_token": {"content": "<|endoftext|>"},
        "eos_token": "<|end|>",
        "additional_special_tokens": ["<|tool|>", "<|nowhere|>"],
        "add_bos_token": True,
    }
    tokenizer = load(tokenizer__json=full.to_str(), tokenizer_config__json=json.dumps(config))
    tool, end = full.token_to_id("<|tool|>"), full.token_to_id("<|end|>")
    assert set(tokenizer.special_tokens) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool|>", "<|end|>"}
    assert {tool, end}.isdisjoint(tokenizer.encode("<|tool|><|end|>"))
    assert tokenizer.encode("<|tool|>", special=True) == [tool]
    assert (tokenizer.bos_id, tokenizer.add_bos) == (full.token_to_id("<|endoftext|>"), True)
    assert tokenizer.stop_ids == {end, full.token_to_id("<|endoftext|>"), full.token_to_id("<|im_end|>")}


def test_eos_added_by_the_post_processor_is_not_taken_for_bos(load: Any) -> None:
    full = _metaspace("never")
    full.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 2)])
    tokenizer = load(tokenizer__json=full.to_str())
    assert tokenizer.bos_id is None and not tokenizer.add_bos
    assert tokenizer.encode("dog", bos=True) == tokenizer.encode("dog")


def test_truncation_and_padding_of_the_file_do_not_apply(load: Any, trained_bpe: Any) -> None:
    full = _byte_level(trained_bpe)
    full.enable_truncation(4)
    full.enable_padding(length=8)
    tokenizer = load(tokenizer__json=full.to_str())
    assert tokenizer.decode(tokenizer.encode("the dog in the park " * 9)) == "the dog in the park " * 9
    assert len(tokenizer.encode("a")) == 1


def test_control_tokens_that_swallow_white_space(load: Any, trained_bpe: Any) -> None:
    full = _byte_level(trained_bpe)
    full.add_special_tokens(
        [AddedToken("<|user|>", rstrip=True, normalized=False), AddedToken("<|mask|>", lstrip=True)]
    )
    reference = tokenizers.Tokenizer.from_str(full.to_str())
    tokenizer = load(tokenizer__json=full.to_str())
    for text in ("<|user|>\n Hi <|mask|> there", "<|user|>  <|user|>", "  <|mask|>"):
        assert tokenizer.encode(text, special=True) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode("<|user|>\n Hi")) == "<|user|>\n Hi"


def test_prepend_normaliser_of_older_llama_files(load: Any) -> None:
    full = _metaspace("never")
    full.pre_tokenizer = None
    full.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    reference = tokenizers.Tokenizer.from_str(full.to_str())
    tokenizer = load(tokenizer__json=full.to_str())
    for text in ("<s>the dog</s><s> the", "the  dog 😀"):
        assert tokenizer.encode(text, special=True) == reference.encode(text, add_special_tokens=False).ids


def test_files_that_do_not_load_are_named(load: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer\.json that"):
        load(tokenizer__json='{"model": {}}')
    plain = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(CheckpointError, match=r"its decoder is missing"):
        load(tokenizer__json=plain.to_str())
