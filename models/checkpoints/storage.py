"""How a tensor lies in a file: mapped views, row slices and joined shards, and giving mapped pages back."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from errors import CheckpointError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Stored(ABC):
    """A StoredTensor that also knows how it is kept: `kind` for people ("bfloat16", "Q4_1"), `nbytes` in the file."""

    def __init__(self, shape: Sequence[int], kind: str, nbytes: int) -> None:
        self.shape = tuple(shape)
        self.kind = kind
        self.nbytes = nbytes

    @abstractmethod
    def read(self) -> torch.Tensor: ...

    @abstractmethod
    def release(self) -> None: ...


class MappedFile:
    """A whole file mapped into memory. Pages come in when touched, and go when `release` says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # copy-on-write only because torch warns about buffers it can't write to; nobody writes
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CheckpointError(path, f"can't be mapped into memory ({error})") from None
        self.size = len(self.buffer)

    def require(self, end: int, what: str) -> None:
        """Raise CheckpointError unless the file has `end` bytes."""
        if end > self.size:
            raise CheckpointError(
                self.path, f"is truncated: {what} ends at byte {end}, the file has {self.size}; fetch it again"
            )

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A view of the file; a copy where torch could not address it in place (unaligned)."""
        count = math.prod(shape)
        if offset % dtype.itemsize != 0:
            raw = bytearray(self.buffer[offset : offset + count * dtype.itemsize])
            return torch.frombuffer(raw, dtype=dtype).view(*shape)
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset).view(*shape)

    @functools.cached_property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def release(self, offset: int, nbytes: int) -> None:
        drop_pages(self._address + offset, nbytes)


class MappedTensor(Stored):
    """Floats that can be used as they lie in the file."""

    def __init__(self, file: MappedFile, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> None:
        super().__init__(shape, kind_of(dtype), math.prod(shape) * dtype.itemsize)
        self._file, self._offset, self._dtype = file, offset, dtype

    def read(self) -> torch.Tensor:
        return self._file.tensor(self._offset, self._dtype, self.shape)

    def release(self) -> None:
        self._file.release(self._offset, self.nbytes)


class LoadedTensor(Stored):
    """A tensor that torch.load gave; `mapped` when its storage is the file itself."""

    def __init__(self, tensor: torch.Tensor, *, mapped: bool) -> None:
        super().__init__(tensor.shape, kind_of(tensor.dtype), tensor.numel() * tensor.element_size())
        self.tensor = tensor
        self._mapped = mapped

    def read(self) -> torch.Tensor:
        return self.tensor

    def release(self) -> None:
        if self._mapped and self.tensor.is_contiguous():
            drop_pages(self.tensor.data_ptr(), self.nbytes)


class RowSlice(Stored):
    """Some rows of another tensor: q, k or v out of a fused wqkv."""

    def __init__(self, whole: Stored, start: int, stop: int) -> None:
        rows = whole.shape[0]
        super().__init__((stop - start, *whole.shape[1:]), whole.kind, whole.nbytes // rows * (stop - start))
        self._whole, self._start, self._stop = whole, start, stop

    def read(self) -> torch.Tensor:
        return self._whole.read()[self._start : self._stop]

    def release(self) -> None:
        self._whole.release()


class JoinedTensor(Stored):
    """The shards of one tensor, side by side along `axis` (Meta's model-parallel files)."""

    def __init__(self, parts: Sequence[Stored], axis: int) -> None:
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        super().__init__(shape, parts[0].kind, sum(part.nbytes for part in parts))
        self._parts, self._axis = parts, axis

    def read(self) -> torch.Tensor:
        return torch.cat([part.read() for part in self._parts], dim=self._axis)

    def release(self) -> None:
        for part in self._parts:
            part.release()


def kind_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def drop_pages(address: int, nbytes: int) -> None:
    """Tell the system that the file-backed pages around this range can go; reading them again brings them back.

    Only for memory mapped from files: ordinary memory would lose its contents. Does nothing where there is no madvise.
    """
    madvise = _madvise()
    if madvise is None or nbytes == 0:
        return
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), mmap.MADV_DONTNEED)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):  # TypeError: Windows refuses None
        return None
