"""What a model's folder says about generation: sampling defaults and the ids that end a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from errors import CheckpointError
from models.checkpoints.params import Fields, read_json

if TYPE_CHECKING:
    from models.checkpoints import Checkpoint

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_GGUF_STOPS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """What generation_config.json beside the weights sets, by the names of SamplingParams; {} without one.

    `do_sample: false` is temperature 0. Raises CheckpointError for values of a wrong type.
    """
    path = checkpoint.folder / "generation_config.json"
    if not path.is_file():
        return {}
    fields = Fields(path, read_json(path))
    found: dict[str, Any] = {name: fields.get(float, name) for name in _NUMBERS}
    found["top_k"] = fields.get(int, "top_k")
    if fields.get(bool, "do_sample") is False:
        found["temperature"] = 0.0
    return {name: value for name, value in found.items() if value is not None}


def stop_ids_from_config(checkpoint: Checkpoint) -> set[int]:
    """Every id that config.json, generation_config.json or GGUF metadata says ends a text."""
    stops: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = checkpoint.folder / name
        if path.is_file():
            stops |= _ids(path, "eos_token_id", read_json(path).get("eos_token_id"))
    for key in _GGUF_STOPS:
        stops |= _ids(checkpoint.path, key, checkpoint.metadata.get(key))
    return stops


def _ids(path: Path, key: str, value: Any) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(path, f"{key} must be an id or a list of ids, got {value!r}")
    return set(ids)
