"""Finds a checkpoint's tokenizer, recognises its kind by content, and gathers what the files around it say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from errors import CheckpointError
from models.tokenizers import settings as files
from models.tokenizers.base import VocabularyTokenizer
from models.tokenizers.settings import TokenizerSettings

if TYPE_CHECKING:
    from models.checkpoints import Checkpoint

_NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer.bin")
_PATTERNS = ("*.model", "*.tiktoken")
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
# Control tokens that end a text or a turn in every family that has them.
_END_NAMES = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<｜end▁of▁sentence｜>",
)


def load(checkpoint: Checkpoint, override: Path | None) -> VocabularyTokenizer:
    """See models.tokenizers.load_tokenizer."""
    from models.checkpoints import stop_ids_from_config

    embedded = override is None and "tokenizer.ggml.tokens" in checkpoint.metadata
    path = checkpoint.path if embedded else find_file(checkpoint.folder if override is None else override)
    if path is None and override is not None:
        raise CheckpointError(override, f"holds none of {', '.join(_NAMES + _PATTERNS)}")
    if path is None:
        raise CheckpointError(
            checkpoint.path,
            f"no tokenizer inside, and none of {', '.join(_NAMES + _PATTERNS)} in {checkpoint.folder}; "
            "give one with --tokenizer FILE",
        )
    if embedded:
        from models.tokenizers import gguf

        tokenizer = gguf.read(path, checkpoint.metadata)
    else:
        said = files.read_settings(path.parent)
        tokenizer = read_file(path, said)
        tokenizer.stop_ids |= _ids(tokenizer, (said.eos,))
    size = checkpoint.config.vocab_size
    ends = tokenizer.stop_ids | stop_ids_from_config(checkpoint) | _ids(tokenizer, _END_NAMES)
    tokenizer.stop_ids = frozenset(i for i in ends if 0 <= i < size)
    if tokenizer.vocab_size > size:
        raise CheckpointError(
            path, f"this tokenizer has {tokenizer.vocab_size} tokens, but the model {checkpoint.path} only {size}"
        )
    return tokenizer


def find_file(place: Path) -> Path | None:
    """The tokenizer file at `place`: the file itself, or the first of the known names in a directory."""
    if not place.exists():
        raise CheckpointError(place, "no such tokenizer file or directory")
    if not place.is_dir():
        return place
    for name in _NAMES:
        if (place / name).is_file():
            return place / name
    found = sorted(path for pattern in _PATTERNS for path in place.glob(pattern) if path.is_file())
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(place, f"several tokenizers ({names}): choose with --tokenizer FILE")
    return found[0] if found else None


def read_file(path: Path, said: TokenizerSettings) -> VocabularyTokenizer:
    """A tokenizer file of any kind; the libraries are imported when a file needs them."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise CheckpointError(path, f"can't be read: {error.strerror}") from None
    if head.lstrip()[:1] == b"{":
        from models.tokenizers import hf

        return hf.read(path, control=said.control, bos=said.bos, add_bos=said.add_bos)
    if _RANK_LINE.match(head):
        from models.tokenizers import llama3

        return llama3.read(path, said.add_bos)
    from models.tokenizers import llama2c, spm

    tokens = llama2c.parse(path.read_bytes())
    if tokens is not None:
        return llama2c.build(path, tokens, said.add_bos)
    if head[:1] == b"\n":  # protobuf: field 1, a piece
        return spm.read_model(path, said.added, said.add_bos, said.control)
    raise CheckpointError(
        path,
        "not a tokenizer: expected a tokenizer.json, sentencepiece .model, tiktoken ranks, or llama2.c tokenizer.bin",
    )


def _ids(tokenizer: VocabularyTokenizer, names: Iterable[str | None]) -> frozenset[int]:
    found = (tokenizer.special_tokens.get(name) for name in names if name is not None)
    return frozenset(i for i in found if i is not None)
