"""One sentencepiece vocabulary as .model, tokenizer.bin and GGUF key-values: all equal sentencepiece itself."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from errors import CheckpointError

_FRAGMENTS = [
    "the",
    " the",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "1",
    "'ll",
    "é",
    "日本",
    "😀",
    "<s>",
    "</s>",
    "<unk>",
    "<0x0A>",
    "\0",
    "▁",
    "Ⅷ",
]
texts = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(_FRAGMENTS), max_size=12).map("".join))
several = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

KINDS = ["model", "bin", "gguf"]


@pytest.fixture(params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, load: Any, spm_model: bytes, llama2c_bytes: bytes, spm_metadata: dict[str, Any]
) -> Any:
    if request.param == "gguf":
        return load(spm_metadata)
    return load(tokenizer__model=spm_model) if request.param == "model" else load(tokenizer__bin=llama2c_bytes)


@several
@given(text=texts)
def test_ids_and_text_equal_sentencepiece(tokenizer: Any, spm_reference: Any, text: str) -> None:
    ids = spm_reference.encode(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids).removeprefix(" ") == spm_reference.decode(ids)


@several
@given(text=texts)
def test_text_comes_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == (" " + text.replace("▁", " ") if text else "")


@several
@given(text=texts)
def test_plain_text_never_becomes_a_control_token(tokenizer: Any, text: str) -> None:
    assert {1, 2}.isdisjoint(tokenizer.encode(f"<s>{text}</s>"))
    assert tokenizer.decode(tokenizer.encode("<s>")) == " <s>"


def test_facts(tokenizer: Any, spm_reference: Any) -> None:
    assert tokenizer.vocab_size == spm_reference.vocab_size()
    assert tokenizer.special_tokens == {"<s>": 1, "</s>": 2}
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.stop_ids) == (1, True, {2})
    assert tokenizer.strips_first_space
    assert tokenizer.token_bytes(2) == b"" and tokenizer.token_text(2) == "</s>"
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0" and tokenizer.token_text(3 + 0xF0) == "�"
    assert tokenizer.token_bytes(10**6) == b""


def test_the_dummy_prefix_is_written_at_the_start_and_after_bos_only(tokenizer: Any, spm_reference: Any) -> None:
    run = spm_reference.encode("the dog")
    assert tokenizer.encode("the dog", bos=True) == [1, *run]
    assert tokenizer.encode("<s>the dog</s><s>the dog", special=True) == [1, *run, 2, 1, *run]
    assert tokenizer.encode("</s>the dog", special=True) == [
        2,
        *spm_reference.encode("the dog")[:0],
        *tokenizer.encode_pieces([2, "the dog"])[1:],
    ]
    assert tokenizer.decode(tokenizer.encode_pieces([2, "the dog"])) == "the dog"


def test_emoji_is_spread_over_byte_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("🦜")[-4:]
    assert [tokenizer.token_bytes(i) for i in ids] == [bytes([b]) for b in "🦜".encode()]


def test_early_tokenizer_bin_with_bytes_as_characters(load: Any, spm_reference: Any) -> None:
    pieces = [spm_reference.id_to_piece(i).replace("▁", " ") for i in range(spm_reference.vocab_size())]
    pieces[3:259] = [chr(value) for value in range(256)]
    data = [piece.encode() for piece in pieces]
    body = b"".join(struct.pack("<fi", spm_reference.get_score(i), len(p)) + p for i, p in enumerate(data))
    tokenizer = load(tokenizer__bin=struct.pack("<I", max(map(len, data))) + body)
    for text in ("the dog 🦜\n\x00é", "  a  Ⅷ"):
        assert tokenizer.encode(text) == spm_reference.encode(text)


def _train(**options: Any) -> bytes:
    writer = io.BytesIO()
    lines = ["the dog and the cat", "a dog, a cat; all dogs", "red, blue & green"] * 5
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=writer, minloglevel=2, hard_vocab_limit=False, **options
    )
    return writer.getvalue()


def test_control_and_user_defined_pieces(load: Any) -> None:
    model = _train(model_type="bpe", vocab_size=60, control_symbols=["[INST]"], user_defined_symbols=["<think>"])
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = load(tokenizer__model=model)
    assert set(tokenizer.special_tokens) == {"<s>", "</s>", "[INST]"}
    thinking = reference.piece_to_id("<think>")
    assert thinking in tokenizer.encode("the <think> dog") and tokenizer.token_bytes(thinking) == b"<think>"
    instruct = tokenizer.special_tokens["[INST]"]
    assert instruct not in tokenizer.encode("[INST]") and tokenizer.encode("[INST]", special=True) == [instruct]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_model_without_dummy_prefix(load: Any, model_type: str) -> None:
    model = _train(model_type=model_type, vocab_size=60, add_dummy_prefix=False)
    tokenizer = load(tokenizer__model=model)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert not tokenizer.strips_first_space
    assert tokenizer.encode("the dog") == reference.encode("the dog")
    assert tokenizer.decode(tokenizer.encode("the dog")) == "the dog"


def test_unknown_characters_decode_as_sentencepiece_does(load: Any) -> None:
    model = _train(model_type="bpe", vocab_size=60)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = reference.encode("a 日 dog")
    assert load(tokenizer__model=model).decode(ids).removeprefix(" ") == reference.decode(ids)


def test_tokens_added_behind_the_model_by_json_files(load: Any, spm_model: bytes, spm_reference: Any) -> None:
    size = spm_reference.vocab_size()
    decoder = {
        "1": {"content": "<s>", "special": True},
        str(size): {"content": "<|im_end|>", "special": True},
        str(size + 1): {"content": "<tool_call>", "special": False},
    }
    config = json.dumps({"added_tokens_decoder": decoder, "eos_token": "<|im_end|>", "add_bos_token": False})
    tokenizer = load(tokenizer__model=spm_model, tokenizer_config__json=config)
    assert tokenizer.vocab_size == size + 2 and not tokenizer.add_bos
    assert tokenizer.special_tokens == {"<s>": 1, "</s>": 2, "<|im_end|>": size}
    assert size in tokenizer.stop_ids
    assert tokenizer.encode("the<tool_call>")[-1] == size + 1
    assert size not in tokenizer.encode("<|im_end|>")


def test_gguf_without_space_prefix_and_bos(load: Any, spm_metadata: dict[str, Any]) -> None:
    more = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = load(spm_metadata | more)
    assert not tokenizer.strips_first_space and not tokenizer.add_bos
    assert tokenizer.decode(tokenizer.encode("the dog")) == "the dog"


def test_gguf_user_defined_unused_empty_and_repeated_tokens(
    load: Any, spm_metadata: dict[str, Any], spm_reference: Any
) -> None:
    added = [("<think>", 4), ("", 5), ("the", 1), ("the", 1), ("<|im_end|>", 3)]
    size = spm_reference.vocab_size()
    metadata = spm_metadata | {
        "tokenizer.ggml.tokens": spm_metadata["tokenizer.ggml.tokens"] + [text for text, _ in added],
        "tokenizer.ggml.scores": spm_metadata["tokenizer.ggml.scores"] + [-1000.0] * len(added),
        "tokenizer.ggml.token_type": spm_metadata["tokenizer.ggml.token_type"] + [kind for _, kind in added],
    }
    tokenizer = load(metadata)
    assert tokenizer.vocab_size == size + 5
    assert tokenizer.encode("a<think>")[-1] == size and tokenizer.token_bytes(size) == b"<think>"
    assert tokenizer.token_bytes(size + 1) == b""
    assert tokenizer.special_tokens["<|im_end|>"] == size + 4 and size + 4 in tokenizer.stop_ids
    assert size + 4 not in tokenizer.encode("<|im_end|>")


def test_broken_vocabularies_are_named(load: Any, spm_metadata: dict[str, Any]) -> None:
    short = spm_metadata | {"tokenizer.ggml.scores": [0.0]}
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores has 1 entries, expected"):
        load(short)
    tokens = list(spm_metadata["tokenizer.ggml.tokens"])
    tokens[3] = "not a byte"
    with pytest.raises(CheckpointError, match="sentencepiece can't load this vocabulary"):
        load(spm_metadata | {"tokenizer.ggml.tokens": tokens})
