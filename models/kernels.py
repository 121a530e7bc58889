"""Products with quantized weights on the CPU: kernels.c, compiled once by the machine's own compiler, or PyTorch.

Both quantize each token to int8 first, by blocks of 32 inputs. Where there is no compiler, or TORCHCHAT_KERNELS=0 says
so, the PyTorch form runs: the same numbers but for float rounding, more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger("torchchat.kernels")

BLOCK = 32  # kernels.c takes inputs by so many
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x (N, in) float32 times int8 rows (out, in), each with a float32 scale (out,): (N, out) float32."""
    kernels = library() if weight.shape[1] % BLOCK == 0 else None
    if kernels is None:
        y = F.linear(rounded(x), weight.float()) * scale
        return y if bias is None else y + bias
    y, scratch = _buffers(x, weight.shape[0])
    kernels.linear_int8(*x.shape, weight.shape[0], *_addresses(x, weight, scale, bias, y, *scratch))
    return y


def linear_int4(x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> Tensor:
    """x (N, in) float32 times 4-bit rows (out, in / 2), see unpack_int4; float16 scale, offset (out, groups, 1)."""
    kernels = library()
    if kernels is None:
        return F.linear(rounded(x), unpack_int4(weight, scale, offset), bias)
    y, scratch = _buffers(x, weight.shape[0])
    group = x.shape[1] // scale.shape[1]
    kernels.linear_int4(*x.shape, weight.shape[0], group, *_addresses(x, weight, scale, offset, bias, y, *scratch))
    return y


def rounded(x: Tensor) -> Tensor:
    """x (N, in) after quantizing to int8 and back; a width that BLOCK doesn't divide is one block."""
    blocks = x.unflatten(1, (-1, BLOCK if x.shape[1] % BLOCK == 0 else x.shape[1]))
    most = blocks.abs().amax(-1, keepdim=True)
    steps = torch.full_like(most, 127).div(most).where(most > 0, 0)  # 127 / most would round twice
    return ((blocks * steps).round() * (most / 127)).flatten(1)


def pack_int4(q: Tensor) -> Tensor:
    """uint8 values 0..15 (out, in) to bytes (out, in / 2): of every 32, the first 16 are the low halves."""
    halves = q.unflatten(1, (-1, 2, BLOCK // 2))
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)


def unpack_int4(weight: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Bytes of pack_int4 with scale and offset (out, groups, 1) to float32 weights (out, in)."""
    blocks = weight.unflatten(1, (-1, 1, BLOCK // 2))
    q = torch.cat((blocks & 15, blocks >> 4), 2).flatten(1)
    groups = q.float().unflatten(1, (scale.shape[1], -1))
    return (groups * scale + offset).flatten(1)


def _buffers(x: Tensor, out: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The result, and what the kernel writes on the way: quantized tokens, scale and sum of every block."""
    scales, sums = torch.empty(2, x.shape[0], x.shape[1] // BLOCK)
    return torch.empty(x.shape[0], out), (torch.empty(x.shape, dtype=torch.int8), scales, sums)


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    assert all(t is None or t.is_contiguous() for t in tensors)
    return [None if t is None else t.data_ptr() for t in tensors]


@functools.cache
def library() -> ctypes.CDLL | None:
    """kernels.c, compiled for this processor and kept in the cache folder; None, and said, where that can't be."""
    if os.environ.get("TORCHCHAT_KERNELS") == "0":
        return None
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        logger.warning("no C compiler (cc): quantized layers run in PyTorch, more slowly")
        return None
    try:
        kernels = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("kernels.c does not compile here: quantized layers run in PyTorch, more slowly (%s)", error)
        return None
    kernels.linear_int8.argtypes = [*[ctypes.c_long] * 3, *[ctypes.c_void_p] * 8]
    kernels.linear_int4.argtypes = [*[ctypes.c_long] * 4, *[ctypes.c_void_p] * 9]
    kernels.linear_int8.restype = kernels.linear_int4.restype = None
    return kernels


def _compiled(compiler: str) -> Path:
    """The shared library's path; compiled unless the same source was, for the same processor."""
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((_FLAGS, _processor())).encode()).hexdigest()[:16]
    path = cache_folder() / f"kernels-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            subprocess.run(
                [compiler, *_FLAGS, "-o", str(made), str(_SOURCE), "-lm"], check=True, capture_output=True, timeout=120
            )
            made.replace(path)
    return path


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def cache_folder() -> Path:
    """Where compiled code is kept: $TORCHCHAT_CACHE, else torchchat's folder in the user's cache."""
    given = os.environ.get("TORCHCHAT_CACHE")
    if given is not None:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path.home() / ".cache" if not base else Path(base)) / "torchchat" / "compiled"
