"""What the JSON files around a tokenizer say about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errors import CheckpointError
from models.checkpoints.params import read_json


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """tokenizer_config.json (and added_tokens.json). None: not said. `added`: id to (text, is control)."""

    bos: str | None = None
    eos: str | None = None
    add_bos: bool | None = None
    control: frozenset[str] = frozenset()
    added: Mapping[int, tuple[str, bool]] = field(default_factory=dict)


def read_settings(folder: Path) -> TokenizerSettings:
    """The settings in `folder`; all None where it has no such files. Raises CheckpointError for malformed ones."""
    path = folder / "tokenizer_config.json"
    config = _read_optional(path)
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    extra = config.get("additional_special_tokens")
    more = [_token_text(token) for token in extra] if isinstance(extra, list) else []
    added = _added_tokens(path, config.get("added_tokens_decoder", {}))
    listed = _read_optional(folder / "added_tokens.json")
    control = {text for text in (bos, eos, *more, *(t for t, special in added.values() if special)) if text}
    for text, token_id in listed.items():
        if not isinstance(token_id, int):
            raise CheckpointError(folder / "added_tokens.json", f"{text!r} has the id {token_id!r}, expected a number")
        added.setdefault(token_id, (text, text in control))
    add_bos = config.get("add_bos_token")
    return TokenizerSettings(bos, eos, add_bos if isinstance(add_bos, bool) else None, frozenset(control), added)


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(token: Any) -> str | None:
    """Tokens are written as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _added_tokens(path: Path, decoder: Any) -> dict[int, tuple[str, bool]]:
    try:
        return {int(i): (token["content"], bool(token.get("special", False))) for i, token in decoder.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(path, "added_tokens_decoder is malformed: expected {id: {content, special}}") from None
