"""Vocabularies embedded in GGUF files (`tokenizer.ggml.*`), rebuilt as `tokenizers` or sentencepiece objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from errors import CheckpointError
from models.tokenizers import spm
from models.tokenizers.base import VocabularyTokenizer
from models.tokenizers.pretokenizers import find_pretokenizer

_PREFIX = "tokenizer.ggml."


class _Fields:
    """`tokenizer.ggml.*` by short name. Raises CheckpointError for one that is missing or has the wrong length."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path, self._metadata = path, metadata

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(_PREFIX + name, default)

    def token_id(self, name: str) -> int | None:
        value = self.get(name + "_token_id")
        return None if value is None else int(value)

    def array(self, name: str, length: int | None = None) -> Sequence[Any]:
        value = self.get(name)
        if value is None:
            raise CheckpointError(self.path, f"{_PREFIX}{name} is missing")
        values = list(value)
        if length is not None and len(values) != length:
            raise CheckpointError(self.path, f"{_PREFIX}{name} has {len(values)} entries, expected {length}")
        return values

    def token_types(self, length: int) -> Sequence[int]:
        """One type per token; all normal if the file has none. BOS and the end tokens are control tokens, even where a
        converter wrote another type."""
        given = self.get("token_type")
        types = [spm.NORMAL] * length if given is None else [int(kind) for kind in self.array("token_type", length)]
        for token_id in map(self.token_id, ("bos", "eos", "eot", "eom")):
            if token_id is not None and token_id < length:
                types[token_id] = spm.CONTROL
        return types


def read(path: Path, metadata: Mapping[str, Any]) -> VocabularyTokenizer:
    """The tokenizer described by a GGUF file's key-values, its stop ids aside. Raises CheckpointError."""
    fields = _Fields(path, metadata)
    kind = fields.get("model")
    if kind == "llama":
        return _sentencepiece(fields)
    if kind == "gpt2":
        return _byte_level(fields)
    raise CheckpointError(path, f"{_PREFIX}model is {kind!r}: expected 'gpt2' (byte-level BPE) or 'llama' (SPM)")


def _sentencepiece(fields: _Fields) -> VocabularyTokenizer:
    tokens: Sequence[str] = fields.array("tokens")
    scores = [float(score) for score in fields.array("scores", len(tokens))]
    model = spm.build_model(
        list(zip(tokens, scores, fields.token_types(len(tokens)), strict=True)),
        dummy_prefix=bool(fields.get("add_space_prefix", True)),
    )
    bos = fields.token_id("bos")
    return spm.SentencePieceTokenizer(
        fields.path, model, bos=-1 if bos is None else bos, eos=-1, add_bos=bool(fields.get("add_bos_token", True))
    )


def _byte_level(fields: _Fields) -> VocabularyTokenizer:
    import tokenizers
    from tokenizers import decoders, models

    from models.tokenizers.hf import HuggingFaceTokenizer

    tokens: Sequence[str] = fields.array("tokens")
    merges = [
        (merge[0] + left, right) for merge in fields.array("merges") for left, _, right in [merge[1:].partition(" ")]
    ]
    name = fields.get("pre", "default")
    pre = find_pretokenizer(name)
    if pre is None:
        raise CheckpointError(
            fields.path, f"{_PREFIX}pre is {name!r}: this pre-tokenizer is not known here; use --tokenizer FILE"
        )
    try:
        model = models.BPE(
            {token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre.ignore_merges, fuse_unk=False
        )
    except Exception as error:  # noqa: BLE001  the library raises bare Exception
        raise CheckpointError(fields.path, f"{_PREFIX}merges do not fit {_PREFIX}tokens: {error}") from None
    full = tokenizers.Tokenizer(model)
    if pre.normalizer is not None:
        full.normalizer = pre.normalizer
    full.pre_tokenizer = pre.splitter
    full.decoder = decoders.ByteLevel()
    types = fields.token_types(len(tokens))
    for kind, add in ((spm.CONTROL, full.add_special_tokens), (spm.USER_DEFINED, full.add_tokens)):
        named = [tokens[i] for i, t in enumerate(types) if t == kind and tokens[i]]
        add([tokenizers.AddedToken(text, normalized=False, special=kind == spm.CONTROL) for text in named])
    bos = fields.token_id("bos")
    return HuggingFaceTokenizer(
        fields.path,
        full,
        bos=tokens[bos] if bos is not None and bos < len(tokens) else None,
        add_bos=bool(fields.get("add_bos_token", pre.add_bos)),
    )
