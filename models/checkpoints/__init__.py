"""One reader per file format, all into one Checkpoint value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from models.config import ModelConfig

if TYPE_CHECKING:
    import torch


class StoredTensor(Protocol):
    """One tensor as it lies in the file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> torch.Tensor:
        """The values, on the CPU: a view of the mapped file where the format allows it (its own float dtype), else a
        new float32 tensor (dequantised). The caller must not write to it."""

    def release(self) -> None:
        """Give back the memory that `read` brought in, mapped pages included. Tensors from `read` must not be used after."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's files, opened but not yet read.

    `tensors` has exactly the names and shapes of `config.tensor_shapes()`. `folder` is where files beside the
    weights are looked for (tokenizer, tokenizer_config.json, generation_config.json, chat_template.jinja).
    `metadata` is what the weights file itself says besides (GGUF key-values, a .pt's other keys); {} when nothing.
    """

    path: Path
    format: str  # "gguf", "safetensors", "llama2c", "pytorch"
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    folder: Path
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # How the weights are stored, for people: "Q4_1", "bfloat16", ...
    precision: str = ""


def open_checkpoint(path: Path) -> Checkpoint:
    """Recognise and open a file or directory by its content. Raises CheckpointError."""
    raise NotImplementedError
