"""Finding a checkpoint's chat template and the names its template may use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from errors import CheckpointError
from models.checkpoints.params import read_json
from models.dialects.builtin import recognise
from models.dialects.plain import PlainDialect
from models.dialects.template import TemplateDialect, TemplateSource

if TYPE_CHECKING:
    from models.checkpoints import Checkpoint
    from models.dialects import Dialect
    from models.tokenizers import Tokenizer

Templates = dict[str, TemplateSource]  # by Hugging Face's names: "default", "tool_use"


def load(checkpoint: Checkpoint, tokenizer: Tokenizer, override: Path | None) -> Dialect:
    """See load_dialect."""
    # the folder of a GGUF file is often a heap of unrelated downloads; the file itself says all
    path = checkpoint.folder / "tokenizer_config.json"
    config = read_json(path) if checkpoint.format != "gguf" and path.is_file() else {}
    names = _special_names(checkpoint.metadata, config, tokenizer)
    if override is not None:
        return TemplateDialect(tokenizer, _read_template(override), names=names)
    own = _own_templates(checkpoint, config)
    default = own["default"] if "default" in own else recognise(tokenizer, _model_names(checkpoint))
    if default is None:
        return PlainDialect(tokenizer)
    return TemplateDialect(tokenizer, default, own.get("tool_use"), names)


def _own_templates(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Templates:
    """What a GGUF file says itself; for other formats a .jinja file beside the weights, else tokenizer_config.json."""
    if checkpoint.format == "gguf":
        return _metadata_templates(checkpoint)
    files = _jinja_files(checkpoint.folder)
    if "default" in files:
        return files
    return _config_templates(config.get("chat_template"), checkpoint.folder / "tokenizer_config.json")


def _jinja_files(folder: Path) -> Templates:
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    return {name: _read_template(path) for name, path in files.items() if path.is_file()}


def _config_templates(given: Any, path: Path) -> Templates:
    """tokenizer_config.json's `chat_template`: a text, or a list of {name, template}."""
    entries = [{"name": "default", "template": given}] if isinstance(given, str) else given
    if entries is None:
        return {}
    try:
        texts = {str(entry["name"]): entry["template"] for entry in entries}
    except (TypeError, KeyError, IndexError) as error:
        raise CheckpointError(path, "chat_template must be a text or a list of {name, template}") from error
    if not all(isinstance(text, str) for text in texts.values()):
        raise CheckpointError(path, "every template in chat_template must be a text")
    return {name: TemplateSource(text, str(path)) for name, text in texts.items()}


def _metadata_templates(checkpoint: Checkpoint) -> Templates:
    """GGUF's `tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for the others."""
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    found = {name: checkpoint.metadata.get(key) for name, key in keys.items()}
    return {name: TemplateSource(text, str(checkpoint.path)) for name, text in found.items() if isinstance(text, str)}


def _special_names(metadata: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """bos_token, eos_token, ... as the checkpoint's files name them, else as the tokenizer has them."""
    names: dict[str, str] = {}
    if tokenizer.bos_id is not None:
        names["bos_token"] = tokenizer.token_text(tokenizer.bos_id)
    if tokenizer.stop_ids:
        names["eos_token"] = tokenizer.token_text(min(tokenizer.stop_ids))  # the end of text precedes the ends of turns
    for name, key in {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= int(token_id) < tokenizer.vocab_size:
            names[name] = tokenizer.token_text(int(token_id))
    for name, value in config.items():
        spelling = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(spelling, str):
            names[name] = spelling
    return names


def _model_names(checkpoint: Checkpoint) -> Iterator[str]:
    """What the model is called: by its file, the folders it is in (a hub cache adds two) and its metadata."""
    yield checkpoint.path.name
    resolved = checkpoint.folder.absolute()
    yield from (folder.name for folder in [resolved, *resolved.parents][:3])
    yield from (
        str(checkpoint.metadata[key]) for key in ("general.name", "general.finetune") if key in checkpoint.metadata
    )


def _read_template(path: Path) -> TemplateSource:
    return TemplateSource(_read_text(path), str(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(path, f"can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(path, "no UTF-8 text") from error
