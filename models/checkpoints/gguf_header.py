"""The header of a GGUF file (ggml's docs/gguf.md): key-values and tensor descriptions.

The gguf package makes a numpy array of every vocabulary entry, which takes seconds; here a list of strings is skipped,
and decoded when asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from errors import CheckpointError
from models.checkpoints.storage import MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: shape outermost first (the file has it reversed), `start` and `nbytes` in the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class KeyValues(Mapping[str, Any]):
    """A GGUF's metadata: Python scalars, strings and lists, decoded at first use."""

    def __init__(self) -> None:
        self._where: dict[str, tuple[_Cursor, GGUFValueType]] = {}
        self._decoded: dict[str, Any] = {}

    def place(self, key: str, at: _Cursor, kind: GGUFValueType) -> None:
        self._where[key] = (at, kind)

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            at, kind = self._where[key]
            self._decoded[key] = at.copy().value(kind)
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


class _Cursor:
    """Reads forward through the mapped header. Everything raises CheckpointError at the file's end."""

    def __init__(self, file: MappedFile, offset: int) -> None:
        self.file, self.offset = file, offset

    def copy(self) -> _Cursor:
        return _Cursor(self.file, self.offset)

    def advance(self, nbytes: int) -> int:
        start = self.offset
        self.offset += nbytes
        self.file.require(self.offset, "the GGUF header")
        return start

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        start = self.advance(struct.calcsize(f"<{code}") * count)
        return struct.unpack_from(f"<{count}{code}", self.file.buffer, start)

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def kind(self) -> GGUFValueType:
        number = self.number("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise CheckpointError(self.file.path, f"the GGUF header is damaged (value type {number})") from None

    def string(self) -> str:
        length = self.number("Q")
        start = self.advance(length)
        return self.file.buffer[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.number(_SCALARS[kind])
        inner, count = self.kind(), self.number("Q")
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count))
        return [self.value(inner) for _ in range(count)]

    def skip(self, kind: GGUFValueType) -> None:
        if kind == GGUFValueType.STRING:
            self.advance(self.number("Q"))
        elif kind != GGUFValueType.ARRAY:
            self.advance(struct.calcsize(f"<{_SCALARS[kind]}"))
        else:
            inner, count = self.kind(), self.number("Q")
            if inner in _SCALARS:
                self.advance(struct.calcsize(f"<{_SCALARS[inner]}") * count)
            elif inner == GGUFValueType.STRING:
                self._skip_strings(count)
            else:
                for _ in range(count):
                    self.skip(inner)

    def _skip_strings(self, count: int) -> None:
        """The vocabulary and its merges are here: the one loop that takes time."""
        offset, size, buffer = self.offset, self.file.size, self.file.buffer
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if offset + 8 > size:
                self.file.require(offset + 8, "the GGUF header")
            offset += 8 + length_at(buffer, offset)[0]
        self.offset = offset
        self.file.require(offset, "the GGUF header")


def read_header(file: MappedFile) -> tuple[KeyValues, list[TensorInfo]]:
    """Raises CheckpointError if it isn't a little-endian GGUF of version 2 or 3, or not whole."""
    cursor = _Cursor(file, len(MAGIC))
    version = cursor.number("I")
    if version not in VERSIONS:
        raise CheckpointError(file.path, f"GGUF version {version} is not supported (little-endian 2 and 3 are)")
    tensor_count, pair_count = cursor.numbers("Q", 2)
    pairs = KeyValues()
    for _ in range(pair_count):
        key, kind = cursor.string(), cursor.kind()
        pairs.place(key, cursor.copy(), kind)
        cursor.skip(kind)
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = pairs.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise CheckpointError(file.path, f"general.alignment is {alignment}")
    data = -(-cursor.offset // alignment) * alignment
    placed = [TensorInfo(i.name, i.kind, i.shape, data + i.start, i.nbytes) for i in infos]
    for info in placed:
        file.require(info.start + info.nbytes, f"tensor {info.name}")
    return pairs, placed


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    """One description; its `start` still counts from the data section."""
    path, name = cursor.file.path, cursor.string()
    n_dims = cursor.number("I")
    shape = tuple(reversed(cursor.numbers("Q", n_dims)))
    number, start = cursor.number("I"), cursor.number("Q")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise CheckpointError(path, f"tensor {name} has type {number}, which the gguf package doesn't know") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if n_dims == 0 or shape[-1] % block != 0:
        raise CheckpointError(
            path, f"tensor {name} has shape {shape}; its rows are not made of {kind.name} blocks of {block}"
        )
    return TensorInfo(name, kind, shape, start, math.prod(shape) // block * block_bytes)
