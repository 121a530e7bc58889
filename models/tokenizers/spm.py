"""sentencepiece models: .model files, and vocabularies with scores rebuilt as one.

sentencepiece writes a space in front of a text ("dummy prefix"), so that a word is the same token wherever it
stands. Here that happens where a text starts: at the very start and after BOS, never after another control token.
This is Meta's own prompt format for Llama 2 (each `<s>` begins a text) and what HF calls legacy=False for the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import sentencepiece

from errors import CheckpointError
from models.tokenizers.base import VocabularyTokenizer

SPACE = "▁"  # how sentencepiece spells a space inside a piece
# sentencepiece_model.proto, ModelProto.SentencePiece.Type; GGUF's tokenizer.ggml.token_type has the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNKNOWN_SURFACE = " ⁇ "  # what sentencepiece decodes its unknown piece to
_PLACEHOLDER = "\ue000"  # begins the stand-ins for pieces that sentencepiece would not load
_NO_PREFIX = b"\x1a\x02\x18\x00"  # normalizer_spec {add_dummy_prefix: false}

Piece = tuple[str, float, int]  # text, score, type


class SentencePieceTokenizer(VocabularyTokenizer):
    """A serialized ModelProto. `bos` and `eos` override the model's own ids (None: the model's own).

    Raises CheckpointError naming `path`.
    """

    bos_starts_text = True

    def __init__(
        self, path: Path, model: bytes, *, bos: int | None = None, eos: int | None = None, add_bos: bool | None = None
    ) -> None:
        self._first = _processor(path, model)
        # Merging a message's bytes onto another's overrides its fields: protobuf's rule, no parser needed.
        self._later = _processor(path, model + _NO_PREFIX)
        self._pieces: list[str] = self._first.id_to_piece(list(range(self._first.vocab_size())))
        ids = range(len(self._pieces))
        control = self._first.is_control(list(ids))
        bos_id = self._first.bos_id() if bos is None else bos
        eos_id = self._first.eos_id() if eos is None else eos
        super().__init__(
            vocab_size=len(self._pieces),
            special_tokens={self._pieces[i]: i for i in ids if control[i]},
            bos_id=bos_id if bos_id in ids else None,
            add_bos=add_bos is not False,
            stop_ids=frozenset({eos_id}) if eos_id in ids else frozenset(),
        )
        self.strips_first_space = self._first.encode("a") != self._later.encode("a")

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        return (self._first if starts else self._later).encode(text)

    def _read_bytes(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        if self._first.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        if self._first.is_unknown(token_id):
            return UNKNOWN_SURFACE.encode()
        return b"" if piece.startswith(_PLACEHOLDER) else piece.replace(SPACE, " ").encode()


def _processor(path: Path, model: bytes) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise CheckpointError(path, f"sentencepiece can't load this vocabulary: {error}") from None
    return processor


def read_model(
    path: Path, added: Mapping[int, tuple[str, bool]], add_bos: bool | None, control: frozenset[str]
) -> SentencePieceTokenizer:
    """A .model file. `added` are tokens that JSON files put behind its vocabulary: id to (text, is control)."""
    model = path.read_bytes()
    size = _processor(path, model).vocab_size()
    extra = sorted((i, text, special or text in control) for i, (text, special) in added.items() if i >= size)
    if [i for i, _, _ in extra] != list(range(size, size + len(extra))):
        raise CheckpointError(
            path, f"added tokens have ids {[i for i, _, _ in extra]}, expected them to follow {size - 1}"
        )
    pieces = (_piece(text, 0.0, CONTROL if special else USER_DEFINED) for _, text, special in extra)
    return SentencePieceTokenizer(path, model + b"".join(pieces), add_bos=add_bos)


def build_model(pieces: Sequence[Piece], *, dummy_prefix: bool) -> bytes:
    """A ModelProto that merges by score as llama.cpp's SPM and llama2.c do, with text taken as it is."""
    byte_fallback = any(kind == BYTE for _, _, kind in pieces)
    trainer = b"\x18\x02" + b"\x98\x02" + bytes([byte_fallback])  # model_type BPE, byte_fallback
    normalizer = b"\x18" + bytes([dummy_prefix]) + b"\x20\x00"  # add_dummy_prefix, remove_extra_whitespaces false
    body = b"".join(_piece(*piece) for piece in _loadable(pieces))
    return body + _message(2, trainer) + _message(3, normalizer)


def _loadable(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """sentencepiece refuses empty and repeated pieces; some files pad their vocabulary with them."""
    seen: set[str] = set()
    for token_id, (text, score, kind) in enumerate(pieces):
        if not text or text in seen:
            text, kind = f"{_PLACEHOLDER}{token_id}", UNUSED
        seen.add(text)
        yield text, score, kind


def _piece(text: str, score: float, kind: int) -> bytes:
    if kind in (NORMAL, USER_DEFINED):
        text = text.replace(" ", SPACE)
    return _message(1, _message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind]))


def _message(field: int, body: bytes) -> bytes:
    """A length-delimited protobuf field."""
    size, length = len(body), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([field << 3 | 2]) + length + bytes([size]) + body
