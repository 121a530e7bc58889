"""Tiny real tokenizers of every kind, as checkpoint folders."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from models.checkpoints import Checkpoint
from models.config import ModelConfig
from models.tokenizers import Tokenizer, load_tokenizer
from models.tokenizers.base import VocabularyTokenizer

TEXTS = [
    "[INST] <<SYS>>\nYou are a helpful assistant.\n<</SYS>>\n\nHello world, tell me a story about a dog. [/INST]",
    'system user assistant tool {"name": "get_weather", "arguments": {"city": "Paris"}}',
    "Once upon a time there was a little dog. Its name was <|im_end|> </s> <s>.",
] * 8
CONTROL = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|eot_id|>", "<s>")
ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class ByteTokenizer(VocabularyTokenizer):
    """A token per byte; control tokens behind them."""

    def __init__(self, control: Sequence[str] = (), bos: str | None = None) -> None:
        special = {name: 256 + i for i, name in enumerate(control)}
        bos_id = None if bos is None else special[bos]
        super().__init__(vocab_size=256 + len(special), special_tokens=special, bos_id=bos_id, add_bos=bos is not None)

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        return list(text.encode())

    def _read_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Tokenizer]:
    return ByteTokenizer


@pytest.fixture(scope="session")
def spell() -> Callable[[Tokenizer, Sequence[int]], str]:
    return _spell


@pytest.fixture(scope="session")
def checkpoint_at() -> Callable[..., Checkpoint]:
    return make_checkpoint


def _spell(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The prompt as text, control tokens spelled out between « and »."""
    control = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    parts: list[str] = []
    run: list[int] = []
    for token_id in [*ids, None]:
        if token_id is not None and token_id not in control:
            run.append(token_id)
            continue
        parts.append(tokenizer.decode(run))
        run = []
        if token_id is not None:
            parts.append(f"«{control[token_id]}»")
    return "".join(parts)


def make_checkpoint(folder: Path, format: str = "safetensors", metadata: Mapping[str, Any] | None = None) -> Checkpoint:
    config = ModelConfig("llama", 8, 1, 1, 1, 8, 8, vocab_size=100_000, context_length=64)
    return Checkpoint(folder / "model.bin", format, config, {}, folder, {} if metadata is None else metadata)


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json: byte-level BPE with control and ordinary added tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS, trainer)
    library.add_tokens(list(ORDINARY))
    folder = tmp_path_factory.mktemp("hf")
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def sp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.model: sentencepiece BPE, as Llama 2's."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in TEXTS for line in text.split("\n")),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    folder = tmp_path_factory.mktemp("sp") / "Llama-2-7b-chat"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


@pytest.fixture(scope="session")
def tiktoken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.model: tiktoken ranks, as Llama 3's."""
    merges = [b"eo", b"eot", b"<|", b"|>", b"he", b"ll", b"llo", b"hello", b" d", b"og"]
    tokens = [bytes([value]) for value in range(256)] + merges
    folder = tmp_path_factory.mktemp("tiktoken") / "Llama3.2-1B-Instruct"
    folder.mkdir()
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


@pytest.fixture(scope="session")
def hf_tokenizer(hf_folder: Path) -> Tokenizer:
    return load_tokenizer(make_checkpoint(hf_folder))


@pytest.fixture(scope="session")
def sp_tokenizer(sp_folder: Path) -> Tokenizer:
    return load_tokenizer(make_checkpoint(sp_folder))


@pytest.fixture(scope="session")
def tiktoken_tokenizer(tiktoken_folder: Path) -> Tokenizer:
    return load_tokenizer(make_checkpoint(tiktoken_folder))
