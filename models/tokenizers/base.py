"""What every wrapper shares: splitting at control tokens, byte tables, decoding."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from errors import RequestError


def check_unicode(text: str) -> None:
    """Raises RequestError for a lone surrogate: it has no UTF-8, so no tokenizer can write it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"the text is not valid Unicode: lone surrogate U+{code:04X} at character {error.start}"
        ) from None


class VocabularyTokenizer(ABC):
    """The Tokenizer protocol over a library that offers two things: ids of plain text, and a token's bytes.

    `special_tokens` are the control tokens, name to id; `stop_ids` the end tokens the tokenizer's own file names
    (the loader adds those of the config files).
    """

    strips_first_space = False
    # Whether the text after a BOS token begins anew, so that the library's dummy prefix is written there too.
    bos_starts_text = False

    def __init__(
        self,
        *,
        vocab_size: int,
        special_tokens: Mapping[str, int],
        bos_id: int | None,
        add_bos: bool,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.vocab_size = vocab_size
        self.special_tokens = special_tokens
        self.bos_id = bos_id
        self.add_bos = add_bos and bos_id is not None
        self.stop_ids = stop_ids
        self._control_names = {token_id: name for name, token_id in special_tokens.items()}
        # Longest first: where one control token begins another, the longer one is meant.
        names = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._bytes: list[bytes | None] = [None] * vocab_size  # filled as tokens are met: start-up stays quick

    @abstractmethod
    def _encode_text(self, text: str, starts: bool) -> list[int]:
        """Ids of plain, non-empty text; `starts` if nothing but BOS comes before it. Never a control token."""

    @abstractmethod
    def _read_bytes(self, token_id: int) -> bytes:
        """The bytes of one token of the vocabulary that is no control token."""

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        front = [self.bos_id] if bos and self.bos_id is not None else []
        return front + self.encode_pieces(self.split(text) if special else [text])

    def split(self, text: str) -> list[str | int]:
        if self._control_pattern is None:
            return [text] if text else []
        pieces: list[str | int] = []
        end = 0
        for match in self._control_pattern.finditer(text):
            if match.start() > end:
                pieces.append(text[end : match.start()])
            pieces.append(self.special_tokens[match.group()])
            end = match.end()
        if end < len(text):
            pieces.append(text[end:])
        return pieces

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        starts = True
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                starts = self.bos_starts_text and piece == self.bos_id
            elif piece:
                check_unicode(piece)
                ids += self._encode_text(piece, starts)
                starts = False
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """b"" too for ids past the vocabulary: embeddings are often padded, and a model may sample the padding."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        found = self._bytes[token_id]
        if found is None:
            found = b"" if token_id in self._control_names else self._read_bytes(token_id)
            self._bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        name = self._control_names.get(token_id)
        return self.token_bytes(token_id).decode("utf-8", "replace") if name is None else name
