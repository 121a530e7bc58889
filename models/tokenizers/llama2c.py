"""llama2.c's tokenizer.bin: pieces and scores of a sentencepiece model, without its types.

Layout (karpathy/llama2.c, tokenizer.py export): uint32 longest piece, then per token float32 score, int32 length,
bytes. Ids 0, 1, 2 are unknown, BOS, EOS; 3..258 the bytes where the model has byte fallback.
"""

from __future__ import annotations

import struct
from pathlib import Path

from errors import CheckpointError
from models.tokenizers import spm

BOS, EOS = 1, 2
_BYTES = range(3, 259)


def parse(data: bytes) -> list[tuple[bytes, float]] | None:
    """(piece, score) of every token, or None if this is no tokenizer.bin."""
    if len(data) < 4:
        return None
    (longest,) = struct.unpack_from("<I", data)
    tokens, at = [], 4
    while at + 8 <= len(data):
        score, length = struct.unpack_from("<fi", data, at)
        if not 0 <= length <= longest or at + 8 + length > len(data):
            return None
        tokens.append((data[at + 8 : at + 8 + length], score))
        at += 8 + length
    return tokens if at == len(data) and len(tokens) > EOS else None


def build(path: Path, tokens: list[tuple[bytes, float]], add_bos: bool | None) -> spm.SentencePieceTokenizer:
    """The sentencepiece model the file was exported from, as far as the file tells."""
    try:
        texts = [piece.decode() for piece, _ in tokens]
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"a piece is not UTF-8: {error}") from None
    byte_names = [f"<0x{value:02X}>" for value in range(256)]
    held = texts[_BYTES.start : _BYTES.stop]
    # An early exporter wrote the bytes themselves as characters.
    has_bytes = held == byte_names or held == [chr(value) for value in range(256)]
    pieces: list[spm.Piece] = []
    for token_id, (text, (_, score)) in enumerate(zip(texts, tokens, strict=True)):
        if token_id == 0:
            pieces.append(("<unk>", score, spm.UNKNOWN))
        elif token_id in (BOS, EOS):
            pieces.append((text.strip("\n"), score, spm.CONTROL))  # exported as "\n<s>\n"
        elif has_bytes and token_id in _BYTES:
            pieces.append((byte_names[token_id - _BYTES.start], score, spm.BYTE))
        else:
            pieces.append((text, score, spm.NORMAL))
    model = spm.build_model(pieces, dummy_prefix=True)
    return spm.SentencePieceTokenizer(path, model, bos=BOS, eos=EOS, add_bos=add_bos)
