"""One reader per file format, all into one Checkpoint value."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from errors import CheckpointError
from models.checkpoints.defaults import generation_defaults, stop_ids_from_config
from models.config import ModelConfig

if TYPE_CHECKING:
    import torch

__all__ = [
    "Checkpoint",
    "StoredTensor",
    "generation_defaults",
    "open_checkpoint",
    "open_files",
    "recognise",
    "stop_ids_from_config",
]


class StoredTensor(Protocol):
    """One tensor as it lies in the file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> torch.Tensor:
        """The values, on the CPU: a view of the mapped file where the format allows it (its own float dtype), else a
        new float32 tensor (dequantised). The caller must not write to it."""

    def release(self) -> None:
        """Give back the memory that `read` brought in, mapped pages included. Tensors from `read` must not be
        used after."""


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


def recognise(path: Path) -> str:
    """The format of a weights file, from its first bytes. Raises CheckpointError when it is none that we read."""
    try:
        with path.open("rb") as file:
            head = file.read(128)
    except OSError as error:
        raise CheckpointError(path, f"can't be read ({error.strerror})") from None
    if not head:
        raise CheckpointError(path, "is empty; fetch it again")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(path, "is a git-lfs pointer, not the weights; run `git lfs pull` where it came from")
    format = _format_of(head)
    if format is None:
        raise CheckpointError(path, "is not a weights file (llama2.c, PyTorch, safetensors and GGUF are recognised)")
    return format


def _format_of(head: bytes) -> str | None:
    if head.startswith(b"GGUF"):
        return "gguf"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 100_000_000:
        return "safetensors"
    # a zip (torch.save since 1.6), or the pickled number 0x1950a86a20f9469cfc6c that older files start with; other
    # pickles count too, so that they get the error that says what is wrong with them
    if head.startswith(b"PK\x03\x04") or (head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        return "pytorch"
    return "llama2c" if _looks_like_llama2c(head) else None


def _looks_like_llama2c(head: bytes) -> bool:
    """The magic of versions 1 and 2, or the legacy header, which is only seven sizes: they must make sense."""
    if head.startswith(b"24ka"):
        return True
    if len(head) < 28:
        return False
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, context = struct.unpack_from("<7i", head)
    return (
        0 < n_layers <= 1024
        and 0 < n_kv_heads <= n_heads <= dim <= 2**17
        and dim % n_heads == n_heads % n_kv_heads == 0
        and 0 < hidden_dim <= 2**20
        and 0 < abs(vocab_size) <= 2**24  # negative: a separate output
        and 0 < context <= 2**24
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """Recognise and open a file or directory by its content. Raises CheckpointError."""
    if path.is_dir():
        from models.checkpoints.folder import open_folder

        return open_folder(path)
    if not path.exists():
        raise CheckpointError(path, "no such file or directory")
    return open_files(path, recognise(path))


def open_files(path: Path, format: str, files: Sequence[Path] | None = None) -> Checkpoint:
    """Open a model whose format is known: the file `path`, or those `files` of the directory `path`."""
    if format == "gguf":
        from models.checkpoints.gguf import open_gguf

        return open_gguf(path if files is None else files[0])
    if format == "safetensors":
        from models.checkpoints.safetensors import open_safetensors

        return open_safetensors(path, files)
    if format == "pytorch":
        from models.checkpoints.pytorch import open_pytorch

        return open_pytorch(path, files)
    from models.checkpoints.llama2c import open_llama2c

    return open_llama2c(path if files is None else files[0])
