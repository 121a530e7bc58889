"""How a model family writes prompts and how its output reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The checkpoint's dialect, from the first of these there is:

    - `override`, a jinja template file;
    - its own template: a GGUF file's `tokenizer.chat_template`, else chat_template.jinja beside the weights, else
      tokenizer_config.json's `chat_template` (all may have a "tool_use" one besides, for when tools are given);
    - the built-in Llama 2 or Llama 3 format, for a model that by tokenizer and name is a chat model of that family;
    - plain joining, for base models.

    Raises CheckpointError naming the file and line of a template that can't be used.
    """
    from models.dialects import loading

    return loading.load(checkpoint, tokenizer, override)
