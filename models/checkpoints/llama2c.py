"""llama2.c's .bin files (karpathy/llama2.c, export.py): legacy, version 1 (float32) and version 2 (int8 groups)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from errors import CheckpointError
from models.checkpoints import Checkpoint
from models.checkpoints.names import fit, precision_of
from models.checkpoints.storage import MappedFile, MappedTensor, Stored
from models.config import ModelConfig

MAGIC = b"24ka"  # 0x616b3432, little-endian
HEADER_BYTES = 256  # of versions 1 and 2
_SIZES = struct.Struct("<7i")  # dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len

_MATRICES = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)
_NORMS = ("attention_norm", "ffn_norm")


@dataclass(frozen=True)
class Header:
    version: int
    config: ModelConfig
    group_size: int  # of version 2, else 0
    end: int  # where the weights start


def open_llama2c(path: Path) -> Checkpoint:
    file = MappedFile(path)
    header = _read_header(file)
    tensors = {0: _legacy, 1: _version1, 2: _version2}[header.version](file, header)
    return Checkpoint(
        path=path,
        format="llama2c",
        config=header.config,
        tensors=fit(path, tensors, header.config),
        folder=path.parent,
        precision=precision_of(tensors),
    )


def _read_header(file: MappedFile) -> Header:
    data = file.buffer
    if data[:4] != MAGIC:
        sizes = _SIZES.unpack_from(data)
        return Header(0, _config(sizes, tied=sizes[5] > 0), 0, _SIZES.size)
    file.require(HEADER_BYTES, "the llama2.c header")
    (version,) = struct.unpack_from("<i", data, 4)
    if version not in (1, 2):
        raise CheckpointError(file.path, f"llama2.c version {version} is not supported; 0, 1 and 2 are")
    sizes = _SIZES.unpack_from(data, 8)
    if min(sizes) <= 0 or sizes[0] % sizes[3] != 0:
        raise CheckpointError(file.path, f"the llama2.c header makes no sense: {sizes}")
    shared, group_size = struct.unpack_from("<Bi", data, 8 + _SIZES.size)
    if version == 2 and (group_size <= 0 or sizes[0] % group_size != 0):
        raise CheckpointError(file.path, f"quantization groups of {group_size} don't divide the width {sizes[0]}")
    return Header(version, _config(sizes, tied=shared != 0), group_size, HEADER_BYTES)


def _config(sizes: tuple[int, ...], *, tied: bool) -> ModelConfig:
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, context = sizes
    return ModelConfig(
        architecture="llama",
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=dim // n_heads,
        hidden_dim=hidden_dim,
        vocab_size=abs(vocab_size),  # legacy files mark a separate output by a negative number
        context_length=context,
        tied=tied,
    )


def _per_layer(config: ModelConfig, module: str) -> Iterator[str]:
    return (f"layers.{i}.{module}.weight" for i in range(config.n_layers))


class _Layout:
    """Hands out consecutive stretches of the file, in the order in which the names are asked for."""

    def __init__(self, file: MappedFile, header: Header) -> None:
        self.file, self.offset, self.shapes = file, header.end, header.config.tensor_shapes()
        self.tensors: dict[str, Stored] = {}

    def take(self, nbytes: int, what: str) -> int:
        start = self.offset
        self.offset += nbytes
        self.file.require(self.offset, what)
        return start

    def floats(self, name: str) -> None:
        start = self.take(math.prod(self.shapes[name]) * 4, f"tensor {name}")
        self.tensors[name] = MappedTensor(self.file, start, torch.float32, self.shapes[name])

    def groups(self, name: str, group_size: int) -> None:
        count = math.prod(self.shapes[name])
        start = self.take(count + count // group_size * 4, f"tensor {name}")
        self.tensors[name] = GroupedInt8(self.file, start, self.shapes[name], group_size)

    def finish(self) -> dict[str, Stored]:
        if self.offset != self.file.size:
            raise CheckpointError(
                self.file.path, f"has {self.file.size} bytes, expected {self.offset} from its llama2.c header"
            )
        return self.tensors


def _legacy(file: MappedFile, header: Header) -> dict[str, Stored]:
    layout, config = _Layout(file, header), header.config
    layout.floats("tok_embeddings.weight")
    for module in ("attention_norm", *_MATRICES[:4], "ffn_norm", *_MATRICES[4:]):
        for name in _per_layer(config, module):
            layout.floats(name)
    layout.floats("norm.weight")
    # cosine and sine tables, which we compute ourselves
    layout.take(2 * config.context_length * (config.head_dim // 2) * 4, "the RoPE table")
    if not config.tied:
        layout.floats("output.weight")
    return layout.finish()


def _version1(file: MappedFile, header: Header) -> dict[str, Stored]:
    layout = _Layout(file, header)
    _norms_then_matrices(layout, header.config, layout.floats)
    return layout.finish()


def _version2(file: MappedFile, header: Header) -> dict[str, Stored]:
    layout = _Layout(file, header)
    _norms_then_matrices(layout, header.config, lambda name: layout.groups(name, header.group_size))
    return layout.finish()


def _norms_then_matrices(layout: _Layout, config: ModelConfig, matrix: Callable[[str], None]) -> None:
    for module in _NORMS:
        for name in _per_layer(config, module):
            layout.floats(name)
    layout.floats("norm.weight")
    matrix("tok_embeddings.weight")
    for module in _MATRICES:
        for name in _per_layer(config, module):
            matrix(name)
    if not config.tied:
        matrix("output.weight")


class GroupedInt8(Stored):
    """int8 values followed by one float32 scale for each group of consecutive values; read as float32."""

    def __init__(self, file: MappedFile, offset: int, shape: tuple[int, ...], group_size: int) -> None:
        self._count = math.prod(shape)
        super().__init__(shape, "int8", self._count + self._count // group_size * 4)
        self._file, self._offset, self._group_size = file, offset, group_size

    def read(self) -> torch.Tensor:
        groups = self._count // self._group_size
        values = self._file.tensor(self._offset, torch.int8, (groups, self._group_size))
        scales = self._file.tensor(self._offset + self._count, torch.float32, (groups, 1))
        # converted and scaled in place: int8 times float32 would make a second float32 copy
        return torch.empty(groups, self._group_size).copy_(values).mul_(scales).view(*self.shape)

    def release(self) -> None:
        self._file.release(self._offset, self.nbytes)
