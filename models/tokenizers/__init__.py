"""One wrapper per tokenizer library behind one protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from models.checkpoints import Checkpoint


class Tokenizer(Protocol):
    """Text to token ids and back.

    Control tokens (`<s>`, `<|im_end|>`, ...) are in `special_tokens`, are no text, and can only be written by
    `encode(..., special=True)`. Ordinary added tokens (`<think>`, `<tool_call>`) are text that happens to be one token.
    """

    vocab_size: int
    bos_id: int | None
    add_bos: bool  # whether a plain prompt starts with BOS
    stop_ids: frozenset[int]  # every id that ends a text: eos and end-of-turn, from all config files
    special_tokens: Mapping[str, int]
    # sentencepiece writes the first word's space into the word: an answer that starts a message drops it
    strips_first_space: bool

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        """Token ids of `text`; BOS in front if `bos` (and the model has one), control tokens recognised only if
        `special`. Raises RequestError for text that is no Unicode (a lone surrogate)."""

    def split(self, text: str) -> list[str | int]:
        """`text` cut at its control tokens: their ids, and the text between them (never an empty string)."""

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """Token ids of what `split` gives; strings are encoded as plain text whatever they spell.
        `encode(text, special=True)` is `encode_pieces(split(text))`; a dialect may rewrite pieces in between."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` as a continuation: every space kept, control tokens skipped, invalid UTF-8 as U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; b"" for control tokens. Joined, they are the text's UTF-8."""

    def token_text(self, token_id: int) -> str:
        """A token's name for logprobs: its text, or the control token's own spelling."""


def load_tokenizer(checkpoint: Checkpoint, override: Path | None = None) -> Tokenizer:
    """The checkpoint's tokenizer, from `override` (a file or directory), the weights file itself or a file beside it.

    Raises CheckpointError that says which files were looked for, or what is wrong with the one found.
    """
    from models.tokenizers import loading

    return loading.load(checkpoint, override)
