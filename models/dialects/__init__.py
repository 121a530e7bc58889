"""How a model family writes prompts and how its output reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from models.checkpoints import Checkpoint
    from models.tokenizers import Tokenizer

Message = Mapping[str, Any]  # {"role", "content", ...}, content already joined to a string or None


class Dialect(Protocol):
    """A family's way to write a conversation. `is_chat` is False for base models, whose message contents are joined."""

    is_chat: bool

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """The prompt's token ids, exactly one BOS where the model has one, ready for the answer. User text never
        becomes control tokens (invariant 8). Raises RequestError with a template's own message (raise_exception)."""


def load_dialect(checkpoint: Checkpoint, tokenizer: Tokenizer, override: Path | None = None) -> Dialect:
    """The checkpoint's dialect: `override` template, its own template, a built-in one, or plain joining."""
    raise NotImplementedError
