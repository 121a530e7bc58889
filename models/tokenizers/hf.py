"""HF `tokenizers`: tokenizer.json files, and GGUF vocabularies rebuilt as one."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from errors import CheckpointError
from models.tokenizers.base import VocabularyTokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, int]:
    """GPT-2's byte-level alphabet, read backwards: code point of a vocabulary character to the byte it stands for."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    return {value: value for value in printable} | {256 + i: value for i, value in enumerate(others)}


_ALPHABET = byte_alphabet()


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How vocabulary entries spell text: byte-level, or with `space` for a space (and <0xNN> for a byte)."""

    byte_level: bool
    space: str = ""
    byte_fallback: bool = False
    first_space: bool = False  # decoding drops the space that encoding put in front

    def read(self, token: str) -> bytes:
        if self.byte_level:
            if all(ord(char) in _ALPHABET for char in token):
                return token.translate(_ALPHABET).encode("latin-1")
            return token.encode()
        found = _BYTE_PIECE.fullmatch(token) if self.byte_fallback else None
        return bytes([int(found[1], 16)]) if found else token.replace(self.space, " ").encode()


class HuggingFaceTokenizer(VocabularyTokenizer):
    """Takes over `full`. `control` are names of control tokens besides those that `full` marks special; names that
    the vocabulary lacks are ignored. `bos` and `add_bos` None: what the file's post-processor does.

    The library never looks for control tokens: text is split at them here, so that one instance, never switched
    between modes, serves all threads. Raises CheckpointError naming `path`.
    """

    def __init__(
        self,
        path: Path,
        full: Tokenizer,
        *,
        control: frozenset[str] = frozenset(),
        bos: str | None = None,
        add_bos: bool | None = None,
    ) -> None:
        full.no_truncation()
        full.no_padding()
        special = _mark_control(full, control)
        added = full.get_added_tokens_decoder()
        front = full.encode("a", add_special_tokens=True).ids[:1]
        processor_bos = next((name for name, i in special.items() if [i] == front), None)
        bos_name = processor_bos if bos is None else bos
        size = max([full.get_vocab_size(False), *(i + 1 for i in added)])
        while full.id_to_token(size) is not None:
            size += 1
        super().__init__(
            vocab_size=size,
            special_tokens=special,
            bos_id=None if bos_name is None else special.get(bos_name),
            add_bos=processor_bos is not None if add_bos is None else add_bos,
        )
        self._spelling = _spelling(path, full)
        self.strips_first_space = self._spelling.first_space
        self._added = {i: token.content for i, token in added.items()}
        self._trims = {
            i: (t.lstrip, t.rstrip) for i, t in added.items() if i in self._control_names and (t.lstrip or t.rstrip)
        }
        self._full = full
        full.encode_special_tokens = True
        self._later = _without_first_prefix(full)

    def split(self, text: str) -> list[str | int]:
        """HF's lstrip and rstrip: some control tokens swallow the white space beside them."""
        pieces = super().split(text)
        for at, piece in enumerate(pieces):
            left, right = self._trims.get(piece, (False, False)) if isinstance(piece, int) else (False, False)
            before, after = pieces[at - 1] if at else 0, pieces[at + 1] if at + 1 < len(pieces) else 0
            if left and isinstance(before, str):
                pieces[at - 1] = before.rstrip()
            if right and isinstance(after, str):
                pieces[at + 1] = after.lstrip()
        return [piece for piece in pieces if piece != ""]

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        ids = (self._full if starts else self._later).encode(text, add_special_tokens=False).ids
        if self._control_names.keys().isdisjoint(ids):
            return ids
        return [part for i in ids for part in (self._spell(i) if i in self._control_names else [i])]

    def _spell(self, control_id: int) -> list[int]:
        """Single-character tokens instead of a control token: some vocabularies can merge up to one from plain text."""
        name = self._control_names[control_id]
        return [token.id for char in name for token in self._full.model.tokenize(char) if token.id != control_id]

    def _read_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._full.id_to_token(token_id)
        return b"" if token is None else self._spelling.read(token)


def _mark_control(full: Tokenizer, names: frozenset[str]) -> dict[str, int]:
    """Marks `names` special in `full`, as transformers does with those of tokenizer_config.json; all control tokens."""
    added = {token.content: token for token in full.get_added_tokens_decoder().values()}
    for name in sorted(names):
        if full.token_to_id(name) is not None and not (name in added and added[name].special):
            old = added.get(name, AddedToken(name, normalized=False))
            full.add_special_tokens(
                [AddedToken(name, lstrip=old.lstrip, rstrip=old.rstrip, normalized=False, special=True)]
            )
    return {token.content: i for i, token in sorted(full.get_added_tokens_decoder().items()) if token.special}


def _without_first_prefix(full: Tokenizer) -> Tokenizer:
    """For text after a control token: Metaspace with prepend_scheme "first" prefixes only the start of the whole."""
    if not any(part.get("prepend_scheme") == "first" for part in _parts(full.pre_tokenizer, "pretokenizers")):
        return full
    later = Tokenizer(full.model)  # shares the vocabulary
    if full.normalizer is not None:
        later.normalizer = full.normalizer
    splitter = copy.deepcopy(full.pre_tokenizer)
    for part in [splitter] if hasattr(splitter, "prepend_scheme") else splitter:
        if getattr(part, "prepend_scheme", None) == "first":
            part.prepend_scheme = "never"
    later.pre_tokenizer = splitter
    for _, token in sorted(full.get_added_tokens_decoder().items()):
        (later.add_special_tokens if token.special else later.add_tokens)([token])
    later.encode_special_tokens = True
    return later


def _parts(component: Any, sequence_key: str) -> list[dict[str, Any]]:
    """A decoder's or pre-tokenizer's settings as tokenizer.json writes them, sequences flattened."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(_flatten(state, sequence_key))


def _flatten(state: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    return [part for inner in state[key] for part in _flatten(inner, key)] if key in state else [dict(state)]


def _spelling(path: Path, full: Tokenizer) -> _Spelling:
    decoders, splitters = _parts(full.decoder, "decoders"), _parts(full.pre_tokenizer, "pretokenizers")
    if any(part["type"] == "ByteLevel" for part in decoders or splitters):
        return _Spelling(byte_level=True)
    spaces = [part["replacement"] for part in decoders if part["type"] == "Metaspace"]
    spaces += [part["pattern"]["String"] for part in decoders if part["type"] == "Replace" and part["content"] == " "]
    if not spaces:
        kinds = ", ".join(part["type"] for part in decoders)
        raise CheckpointError(
            path, f"its decoder is {kinds if kinds else 'missing'}: expected ByteLevel, Metaspace or Replace '▁'"
        )
    return _Spelling(
        byte_level=False,
        space=spaces[0],
        byte_fallback=any(part["type"] == "ByteFallback" for part in decoders),
        first_space=any(
            (part["type"] == "Strip" and part["start"] > 0)
            or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
            for part in decoders
        ),
    )


def read(path: Path, *, control: frozenset[str], bos: str | None, add_bos: bool | None) -> HuggingFaceTokenizer:
    """A tokenizer.json. Raises CheckpointError if the library can't load it."""
    try:
        full = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  the library raises bare Exception
        raise CheckpointError(path, f"not a tokenizer.json that the tokenizers library can load: {error}") from None
    return HuggingFaceTokenizer(path, full, control=control, bos=bos, add_bos=add_bos)
