"""Weights without settings of their own: what lies beside them, and both put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from errors import CheckpointError
from models.checkpoints import Checkpoint
from models.checkpoints.huggingface import config_from_huggingface
from models.checkpoints.names import HUGGINGFACE, fit, is_huggingface, precision_of, rename, shapes_of
from models.checkpoints.params import config_from_params, read_json
from models.checkpoints.storage import FLOATS, Stored, kind_of

_FLOAT_KINDS = frozenset(kind_of(dtype) for dtype in FLOATS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """A model's hyperparameters as a format spells them, and the file they came from (for messages)."""

    path: Path
    values: Mapping[str, Any]

    @property
    def is_huggingface(self) -> bool:
        return "dim" not in self.values and ("hidden_size" in self.values or "architectures" in self.values)


def find_settings(weights: Path) -> Settings:
    """The first of <stem>.json, params.json and config.json beside `weights` that describes a model."""
    candidates = [weights.with_name(name) for name in (f"{weights.stem}.json", "params.json", "config.json")]
    for path in candidates:
        if not path.is_file():
            continue
        settings = Settings(path, read_json(path))
        if "dim" in settings.values or settings.is_huggingface:
            return settings
    names = ", ".join(dict.fromkeys(path.name for path in candidates))
    raise CheckpointError(weights, f"doesn't say what model it is, and no settings lie beside it (looked for {names})")


def indexed_files(folder: Path, suffix: str) -> list[Path]:
    """The shards that a *`suffix`.index.json in `folder` lists; [] without one.

    Raises CheckpointError for a missing shard.
    """
    for index in sorted(folder.glob(f"*{suffix}.index.json")):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(index, "weight_map is missing")
        shards = [folder / str(name) for name in sorted({str(shard) for shard in weight_map.values()})]
        for shard in shards:
            if not shard.is_file():
                raise CheckpointError(shard, f"is missing; {index.name} lists it")
        return shards
    return []


def assemble(
    path: Path, format: str, stored: Mapping[str, Stored], settings: Settings, metadata: Mapping[str, Any]
) -> Checkpoint:
    """Rename, choose the config's reader by its spelling and the RoPE layout by the tensors' names, and check."""
    names_are_huggingface = is_huggingface(stored)
    tensors = rename(path, stored, HUGGINGFACE if names_are_huggingface else {})
    for name, tensor in tensors.items():
        if tensor.kind not in _FLOAT_KINDS:
            raise CheckpointError(
                path, f"tensor {name} is {tensor.kind}; expected one of {', '.join(sorted(_FLOAT_KINDS))}"
            )
    if settings.is_huggingface:
        config = config_from_huggingface(settings.path, settings.values)
    else:
        config = config_from_params(settings.path, settings.values, shapes_of(tensors))
    config = dataclasses.replace(config, rope_layout="half" if names_are_huggingface else "interleaved")
    fitted = fit(path, tensors, config)
    return Checkpoint(
        path=path,
        format=format,
        config=config,
        tensors=fitted,
        folder=path if path.is_dir() else path.parent,
        metadata=metadata,
        precision=precision_of(fitted),
    )
