"""Checkpoint to Transformer: tensor by tensor, so that the file and the model are never both in memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import SetupError
from models.checkpoints import Checkpoint
from models.quantize import Int8Embedding, Quantization, quantized_linear, require_groups
from models.transformer import Transformer, rope_angles

Progress = Callable[[int], object]  # told how many more tensors are done

# Where the model keeps several of the checkpoint's tensors in one matrix.
_FUSED = {"wqkv": ("wq", "wk", "wv"), "w13": ("w1", "w3")}


def build_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: Quantization | None = None,
    context_length: int | None = None,
    progress: Progress | None = None,
) -> Transformer:
    """The checkpoint's model in `dtype` on `device`, its linear layers quantized as asked, ready to run."""
    quantization = Quantization() if quantization is None else quantization
    config = checkpoint.config
    length = config.context_length if context_length is None else context_length
    with torch.device("meta"):
        model = Transformer(config, length)
    require_groups(model, quantization)
    loader = _Loader(checkpoint, dtype, torch.device(device), quantization, progress)
    with torch.inference_mode(), _memory_given_back():
        loader.fill(model)
        model.cos, model.sin = rope_angles(config, length, device)
    return model.eval()


@contextlib.contextmanager
def _memory_given_back() -> Iterator[None]:
    """glibc keeps what is freed for later, by and by even matrices, which would add to the peak: not meanwhile."""
    threshold, usual = -3, 32 * 2**20  # M_MMAP_THRESHOLD, and the largest that glibc would come to by itself
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(threshold, 2**20)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(threshold, usual)


class _Loader:
    """Replaces a meta-device model's weights, module by module."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization,
        progress: Progress | None,
    ) -> None:
        self.tensors, self.path = checkpoint.tensors, checkpoint.path
        self.dtype, self.device, self.quantization = dtype, device, quantization
        self.config, self.tied, self.progress = checkpoint.config, checkpoint.config.tied, progress

    def fill(self, model: Transformer) -> None:
        """Largest first: what making a layer takes for a moment is then taken while little else is there."""
        for name, module in sorted(model.named_modules(), key=lambda named: _size(named[1]), reverse=True):
            if name == "output" and self.tied:
                continue  # comes with the table
            if isinstance(module, nn.Linear):
                bias = self.read(f"{name}.bias") if module.bias is not None else None
                _replace(model, name, quantized_linear(self.read(f"{name}.weight"), bias, self.quantization))
            elif isinstance(module, nn.Embedding):
                self.fill_table(model, self.read(f"{name}.weight"))
            elif isinstance(getattr(module, "weight", None), nn.Parameter):  # norms
                module.weight = nn.Parameter(self.read(f"{name}.weight"), requires_grad=False)

    def fill_table(self, model: Transformer, table: Tensor) -> None:
        """The embeddings and, from the same tensor, a tied output: one memory where neither changes its form."""
        if self.tied:
            _replace(model, "output", quantized_linear(table, None, self.quantization))
        if self.quantization.embedding:
            _replace(model, "tok_embeddings", Int8Embedding(table, self.quantization.embedding_group))
        else:
            model.tok_embeddings.weight = nn.Parameter(table, requires_grad=False)

    def read(self, name: str) -> Tensor:
        """One tensor of the model, fused from the checkpoint's where it must be, in our dtype, owning its memory."""
        parts = {part: self.tensors[part] for part in _sources(name)}
        first = next(iter(parts.values()))
        rows = sum(part.shape[0] for part in parts.values())
        try:
            whole = torch.empty((rows, *first.shape[1:]), dtype=self.dtype, device=self.device)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            raise SetupError(f"{self.path}: no memory for {name} on {self.device}: {why}") from None
        targets = whole.split([part.shape[0] for part in parts.values()])
        for (part_name, part), target in zip(parts.items(), targets, strict=True):
            self.copy(part_name, part.read(), target)
            part.release()
            if self.progress is not None:
                self.progress(1)
        return whole

    def copy(self, name: str, source: Tensor, target: Tensor) -> None:
        """In the model's order: q and k rows that are rotated in pairs, there side by side, lie half a head apart."""
        if self.config.rope_layout == "interleaved" and name.split(".")[-2] in ("wq", "wk"):
            pairs = source.unflatten(0, (-1, self.config.head_dim // 2, 2))
            target.unflatten(0, (-1, 2, self.config.head_dim // 2)).copy_(pairs.transpose(1, 2))
        else:
            target.copy_(source)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _sources(name: str) -> list[str]:
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def resolve_device(name: str) -> torch.device:
    """auto: cuda, then mps, else cpu. Raises SetupError when an accelerator asked for is not there."""
    have = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(d for d in ("cuda", "mps", "cpu") if have[d]))
    if name not in have:
        raise SetupError(f"--device must be auto, cpu, cuda or mps, got {name!r}.", param="device")
    if not have[name]:
        raise SetupError(f"--device {name}: this PyTorch sees no {name} device; use --device cpu.", param="device")
    return torch.device(name)


_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: float32 on the CPU, bfloat16 on accelerators. Raises SetupError for what the device can't multiply."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise SetupError(f"--dtype must be auto or one of {', '.join(_DTYPES)}, got {name!r}.", param="dtype")
    dtype = _DTYPES[name]
    if dtype != torch.float32:
        try:
            F.linear(*torch.ones(2, 1, 8, dtype=dtype, device=device))
        except (RuntimeError, TypeError) as error:  # TypeError: what MPS says
            why = str(error).partition("\n")[0]
            raise SetupError(
                f"--dtype {name}: not on this {device.type} ({why}); use float32.", param="dtype"
            ) from None
    return dtype


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, as far as it tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
