"""Where a tokenizer is looked for, how its kind is recognised, and what the files around it add."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from errors import CheckpointError, RequestError
from models.tokenizers import load_tokenizer


@pytest.fixture
def json_text(trained_bpe: Any) -> str:
    return str(trained_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)).to_str())


def _kind(tokenizer: Any) -> str:
    return type(tokenizer).__name__


def test_kind_is_decided_by_content_not_by_name(
    load: Any, tmp_path: Path, json_text: str, ranks_bytes: bytes, spm_model: bytes, llama2c_bytes: bytes
) -> None:
    contents = {
        "HuggingFaceTokenizer": json_text.encode(),
        "Llama3Tokenizer": ranks_bytes,
        "SentencePieceTokenizer": spm_model,
    }
    for name in ("tokenizer.json", "tokenizer.model", "vocabulary"):
        for kind, content in contents.items():
            (tmp_path / name).write_bytes(content)
            assert _kind(load(override=tmp_path / name)) == kind
        (tmp_path / name).write_bytes(llama2c_bytes)
        assert load(override=tmp_path / name).special_tokens == {"<s>": 1, "</s>": 2}


def test_lookup_order(
    load: Any, tmp_path: Path, json_text: str, ranks_bytes: bytes, spm_metadata: Any, llama2c_bytes: bytes
) -> None:
    assert _kind(load(tekken__model=ranks_bytes)) == "Llama3Tokenizer"
    assert _kind(load(tokenizer__bin=llama2c_bytes)) == "SentencePieceTokenizer"
    assert _kind(load(tokenizer__model=ranks_bytes)) == "Llama3Tokenizer"
    assert _kind(load(tokenizer__json=json_text)) == "HuggingFaceTokenizer"
    assert _kind(load(spm_metadata)) == "SentencePieceTokenizer"
    assert _kind(load(spm_metadata, override=tmp_path / "tekken.model")) == "Llama3Tokenizer"


def test_override_may_be_a_directory(checkpoint: Any, tmp_path: Path, ranks_bytes: bytes) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "cl.tiktoken").write_bytes(ranks_bytes)
    assert _kind(load_tokenizer(checkpoint(), other)) == "Llama3Tokenizer"


def test_nothing_found_says_what_was_looked_for(checkpoint: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json, tokenizer\.model, tokenizer\.bin.*--tokenizer FILE"):
        load_tokenizer(checkpoint())


def test_several_candidates_need_a_choice(load: Any, ranks_bytes: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"several tokenizers \(a\.model, b\.tiktoken\): choose with --tokenizer"):
        load(a__model=ranks_bytes, b__tiktoken=ranks_bytes)


@pytest.mark.parametrize(
    "content", [b"", b"hello there", b"version https://git-lfs.github.com/spec/v1\n", b"\n\x05junk", b"GGUF\x03"]
)
def test_other_files_are_refused(load: Any, content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: (not a tokenizer|sentencepiece can't load)"):
        load(tokenizer__model=content)


def test_missing_override(load: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such tokenizer file"):
        load(override=tmp_path / "nowhere.model")


def test_an_override_without_a_tokenizer_is_itself_named(load: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"empty: holds none of tokenizer\.json") as caught:
        load(override=empty)
    assert "give one with" not in caught.value.message


def test_vocabulary_larger_than_the_model(checkpoint: Any, tmp_path: Path, ranks_bytes: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(ranks_bytes)
    assert load_tokenizer(checkpoint(vocab_size=524)).vocab_size == 524
    with pytest.raises(CheckpointError, match=r"has 524 tokens, but the model .* only 523"):
        load_tokenizer(checkpoint(vocab_size=523))


def test_stop_ids_are_the_union_of_all_files(load: Any, json_text: str) -> None:
    tokenizer = load(
        tokenizer__json=json_text,
        config__json=json.dumps({"eos_token_id": 7}),
        generation_config__json=json.dumps({"eos_token_id": [8, 9]}),
        tokenizer_config__json=json.dumps({"eos_token": "<|im_start|>"}),
    )
    assert tokenizer.stop_ids == {0, 1, 2, 7, 8, 9}


def test_broken_settings_are_named(load: Any, json_text: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load(tokenizer__json=json_text, tokenizer_config__json="{")
    with pytest.raises(CheckpointError, match="added_tokens_decoder is malformed"):
        load(tokenizer__json=json_text, tokenizer_config__json='{"added_tokens_decoder": {"x": 1}}')


@pytest.mark.parametrize("special", [False, True])
def test_lone_surrogates_are_refused(
    load: Any, special: bool, json_text: str, ranks_bytes: bytes, spm_model: bytes
) -> None:
    for files in ({"tokenizer__model": ranks_bytes}, {"tokenizer__model": spm_model}, {"tokenizer__json": json_text}):
        with pytest.raises(RequestError, match=r"lone surrogate U\+D83D at character 3"):
            load(**files).encode("hi \ud83d!", special=special)


def test_split_and_encode_pieces_are_what_encode_does(load: Any, json_text: str) -> None:
    tokenizer = load(tokenizer__json=json_text)
    text = "<|im_start|>user\nhi<|im_end|>"
    pieces = tokenizer.split(text)
    assert pieces == [1, "user\nhi", 2]
    assert tokenizer.encode_pieces(pieces) == tokenizer.encode(text, special=True)
    assert {1, 2}.isdisjoint(tokenizer.encode_pieces([text]))
