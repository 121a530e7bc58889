"""The dialect of base models: no markup at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from errors import RequestError

if TYPE_CHECKING:
    from models.dialects import Message
    from models.tokenizers import Tokenizer


class PlainDialect:
    """Message contents, whatever their role, one per line and nothing around them: the model goes on from the last
    one. BOS once if the tokenizer wants it. Control tokens spelled in a content are text. Story models that are given
    `[INST]` markup write nonsense."""

    is_chat = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """See Dialect.render. `template_kwargs` say how a template should write, and there is none."""
        if tools:
            raise RequestError("This model has no chat template, so it can't be given tools.", param="tools")
        contents = [message["content"] for message in messages if message.get("content") is not None]
        ids = self._tokenizer.encode("\n".join(contents), bos=self._tokenizer.add_bos)
        if not ids:
            raise RequestError("The messages give an empty prompt.", param="messages")
        return ids
