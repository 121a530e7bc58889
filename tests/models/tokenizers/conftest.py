"""Tiny tokenizers of every kind, trained here on a few sentences."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, trainers

from models.checkpoints import Checkpoint
from models.config import ModelConfig

SENTENCES = [
    "Once upon a time, there was a little dog named Max.",
    "He loved to run in the park and play with his red ball.",
    "I'll say it's 12345 times better, isn't it?  Two  spaces, too.",
    "The sun was shining; the birds were singing a song: la la la!",
    "Das Mädchen aß Äpfel. El niño comió. 日本語のテキスト。 emoji 😀😀",
    "def main():\n    return {'a': [1, 2, 3]}\n\n\tif x == 1:\r\n",
] * 3


@pytest.fixture(scope="session")
def spm_model() -> bytes:
    """A BPE sentencepiece model like Llama 2's: identity normaliser, byte fallback, dummy prefix."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in SENTENCES for line in text.split("\n") if line.strip()),
        model_writer=writer,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return writer.getvalue()


@pytest.fixture(scope="session")
def spm_reference(spm_model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=spm_model)


@pytest.fixture(scope="session")
def llama2c_bytes(spm_reference: sentencepiece.SentencePieceProcessor) -> bytes:
    """What llama2.c's tokenizer.py exports."""
    pieces = [spm_reference.id_to_piece(i) for i in range(spm_reference.vocab_size())]
    pieces[1], pieces[2] = "\n<s>\n", "\n</s>\n"
    data = [piece.replace("▁", " ").encode() for piece in pieces]
    body = b"".join(struct.pack("<fi", spm_reference.get_score(i), len(p)) + p for i, p in enumerate(data))
    return struct.pack("<I", max(map(len, data))) + body


@pytest.fixture(scope="session")
def spm_metadata(spm_reference: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """The same vocabulary as GGUF key-values."""
    ids = range(spm_reference.vocab_size())
    kinds = [(spm_reference.is_unknown, 2), (spm_reference.is_control, 3), (spm_reference.is_byte, 6)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm_reference.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [spm_reference.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((kind for test, kind in kinds if test(i)), 1) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def trained_bpe() -> Callable[[Any], tokenizers.Tokenizer]:
    """Trains a byte-level BPE behind a pre-tokenizer, with control tokens in front and <think> added behind."""

    def train(splitter: Any) -> tokenizers.Tokenizer:
        full = tokenizers.Tokenizer(models.BPE())
        full.pre_tokenizer = splitter
        full.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=450,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        full.train_from_iterator(SENTENCES, trainer)
        full.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
        return full

    return train


@pytest.fixture(scope="session")
def ranks_bytes() -> bytes:
    """A tiktoken rank file: the 256 bytes and a few merges."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += [
        b"he",
        b"ll",
        b"hell",
        b"hello",
        b" t",
        b" th",
        b" the",
        b"\xf0\x9f",
        b"\xf0\x9f\x98",
        b"12",
        b"123",
        b"\n\n",
    ]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Checkpoint]:
    """A checkpoint of no tensors in tmp_path with the given metadata."""

    def make(metadata: Mapping[str, Any] | None = None, vocab_size: int = 100_000) -> Checkpoint:
        config = ModelConfig("llama", 8, 1, 1, 1, 8, 8, vocab_size, 16)
        kind = "pytorch" if metadata is None else "gguf"
        return Checkpoint(tmp_path / "weights", kind, config, {}, tmp_path, {} if metadata is None else metadata)

    return make


@pytest.fixture
def load(tmp_path: Path, checkpoint: Callable[..., Checkpoint]) -> Callable[..., Any]:
    """Writes `files` beside the weights and loads the tokenizer."""
    from models.tokenizers import load_tokenizer

    def make(metadata: Mapping[str, Any] | None = None, override: Path | None = None, **files: bytes | str) -> Any:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            (tmp_path / name.replace("__", ".")).write_bytes(data)
        return load_tokenizer(checkpoint(metadata), override)

    return make
