"""tiktoken rank files with Llama 3's split pattern and control tokens.

The file holds only `base64 rank` lines; pattern and control tokens are Meta's (llama_models/llama3/tokenizer.py).
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import tiktoken

from errors import CheckpointError
from models.tokenizers.base import VocabularyTokenizer

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
SPECIAL_TOKENS = (*_NAMED, *(f"<|reserved_special_token_{2 + i}|>" for i in range(256 - len(_NAMED))))


class Llama3Tokenizer(VocabularyTokenizer):
    """tiktoken over a list of byte strings in rank order; the 256 control tokens follow them."""

    def __init__(self, path: Path, tokens: list[bytes], *, add_bos: bool | None = None) -> None:
        special = {name: len(tokens) + i for i, name in enumerate(SPECIAL_TOKENS)}
        super().__init__(
            vocab_size=len(tokens) + len(special),
            special_tokens=special,
            bos_id=special["<|begin_of_text|>"],
            add_bos=add_bos is not False,
            stop_ids=frozenset({special["<|end_of_text|>"], special["<|eot_id|>"], special["<|eom_id|>"]}),
        )
        self._tokens = tokens
        ranks = {token: rank for rank, token in enumerate(tokens)}
        self._encoding = tiktoken.Encoding(str(path), pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def _read_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]


def read(path: Path, add_bos: bool | None) -> Llama3Tokenizer:
    """A rank file. Raises CheckpointError for malformed lines, gaps, or bytes that have no token."""
    tokens: list[bytes] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            tokens.append(base64.b64decode(encoded, validate=True))
            position = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(path, f"line {number} is not a base64 token and its rank: {line[:60]!r}") from None
        if position != len(tokens) - 1:
            raise CheckpointError(path, f"line {number} has rank {position}, expected {len(tokens) - 1}")
    known = set(tokens)
    missing = [value for value in range(256) if bytes([value]) not in known]
    if missing or len(known) != len(tokens):
        raise CheckpointError(
            path, f"{len(tokens) - len(known)} repeated tokens, {len(missing)} byte values without a token"
        )
    return Llama3Tokenizer(path, tokens, add_bos=add_bos)
