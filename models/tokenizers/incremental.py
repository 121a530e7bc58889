"""Tokens to text as they come, never showing half a character."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.tokenizers import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """`push` each token id and get the text it completes; `flush` at the end.

    Joined, this is `tokenizer.decode` of all the ids, without a character that was cut at the very end (by
    max_tokens, say) and, if `strip_first_space`, without one leading space.
    """

    def __init__(self, tokenizer: Tokenizer, strip_first_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._strip = strip_first_space
        self._decoder = _utf8_decoder("replace")

    def push(self, token_id: int) -> str:
        """The text that became complete, perhaps "": a character's last byte releases it, an impossible byte U+FFFD."""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """The end of the text. The beginning of a character that never came is dropped."""
        held = self._decoder.decode(b"", final=True)
        # A beginning reads as one U+FFFD. Python also holds back half a surrogate, which no byte could complete: two.
        return "" if held == "\ufffd" else held
