"""Safetensors files (https://github.com/huggingface/safetensors): a length, a JSON header, then the bytes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from errors import CheckpointError
from models.checkpoints import Checkpoint, recognise
from models.checkpoints.beside import assemble, find_settings, indexed_files
from models.checkpoints.storage import MappedFile, MappedTensor, Stored

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def open_safetensors(path: Path, files: Sequence[Path] | None = None) -> Checkpoint:
    """The model in `files`, which are all in one folder with its settings; `path` is what the user named.

    Without `files`, `path` is a file; if an index beside it lists it, all the shards are meant.
    """
    if files is None:
        shards = indexed_files(path.parent, ".safetensors")
        files = shards if path in shards else [path]
    settings = find_settings(files[0])
    stored: dict[str, Stored] = {}
    metadata: dict[str, Any] = {}
    for file in files:
        if recognise(file) != "safetensors":
            raise CheckpointError(file, "is not a safetensors file")
        tensors, about = _read_header(MappedFile(file))
        for name, tensor in tensors.items():
            if name in stored:
                raise CheckpointError(file, f"tensor {name} is in another file of the model, too")
            stored[name] = tensor
        metadata |= about
    return assemble(path, "safetensors", stored, settings, metadata)


def _read_header(file: MappedFile) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors of one file, and its __metadata__."""
    (length,) = struct.unpack_from("<Q", file.buffer)
    start = 8 + length
    file.require(start, "the header")
    try:
        header = json.loads(file.buffer[8:start])
        if not isinstance(header, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise CheckpointError(file.path, f"the safetensors header is damaged ({error})") from None
    metadata = header.pop("__metadata__", {})
    return {name: _tensor(file, start, name, entry) for name, entry in header.items()}, metadata


def _tensor(file: MappedFile, start: int, name: str, entry: Mapping[str, Any]) -> Stored:
    try:
        kind, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
        first, last = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(file.path, f"tensor {name} is described wrongly: {entry}") from None
    if kind not in _DTYPES:
        raise CheckpointError(file.path, f"tensor {name} is {kind}; expected one of {', '.join(_DTYPES)}")
    dtype = _DTYPES[kind]
    if first < 0 or any(size < 0 for size in shape) or last - first != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(file.path, f"tensor {name} has {last - first} bytes, expected those of {kind} {shape}")
    file.require(start + last, f"tensor {name}")
    return MappedTensor(file, start + first, dtype, shape)
