"""GGUF files of architectures llama, qwen2 and granite; quantized tensors are dequantised by the gguf package."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from errors import CheckpointError
from models.checkpoints import Checkpoint, recognise
from models.checkpoints.gguf_header import KeyValues, TensorInfo, read_header
from models.checkpoints.names import GGUF, fit, precision_of, rename
from models.checkpoints.params import Fields
from models.checkpoints.storage import MappedFile, MappedTensor, Stored
from models.config import ModelConfig, RopeScaling

# llama.cpp's converter permutes the q and k rows of these to interleaved pairs; it leaves qwen2's as HF has them
ROPE_LAYOUTS = {"llama": "interleaved", "granite": "interleaved", "qwen2": "half"}

_VIEWS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}
# values dequantised at a time: the package makes several temporary arrays of this size
_SLICE = 2**18
_SPLIT_NAME = re.compile(r"-\d{5}-of-(?P<count>\d{5})(?=\.[^.]*$)")


def open_gguf(path: Path) -> Checkpoint:
    """A file, or all parts of a split model when `path` is one of them."""
    pairs, stored = _read(path)
    if pairs.get("split.count", 1) > 1:
        pairs, stored = _read_split(path, pairs["split.count"])
    factors = stored.pop("rope_freqs.weight", None)
    tensors = rename(path, stored, GGUF)
    config = _config(path, pairs, tensors, factors)
    fitted = fit(path, tensors, config)
    return Checkpoint(
        path=path,
        format="gguf",
        config=config,
        tensors=fitted,
        folder=path.parent,
        metadata=pairs,
        precision=precision_of(fitted),
    )


def _read(path: Path) -> tuple[KeyValues, dict[str, Stored]]:
    if recognise(path) != "gguf":
        raise CheckpointError(path, "is not a GGUF file")
    file = MappedFile(path)
    pairs, infos = read_header(file)
    return pairs, {info.name: _stored(file, info) for info in infos}


def _read_split(path: Path, count: int) -> tuple[KeyValues, dict[str, Stored]]:
    """The key-values are in the first part, the tensors in all of them."""
    if _SPLIT_NAME.search(path.name) is None:
        raise CheckpointError(path, f"is one of {count} parts, but isn't named NAME-00001-of-{count:05}.gguf")
    parts = [path.with_name(_SPLIT_NAME.sub(f"-{i:05}-of-{count:05}", path.name)) for i in range(1, count + 1)]
    stored: dict[str, Stored] = {}
    for part in parts:
        if not part.is_file():
            raise CheckpointError(part, f"is missing; the model has {count} parts")
        stored |= _read(part)[1]
    return _read(parts[0])[0], stored


def _stored(file: MappedFile, info: TensorInfo) -> Stored:
    if info.kind in _VIEWS:
        return MappedTensor(file, info.start, _VIEWS[info.kind], info.shape)
    return QuantizedTensor(file, info)


class QuantizedTensor(Stored):
    """Blocks of a GGUF quantization; read as a new float32 tensor."""

    def __init__(self, file: MappedFile, info: TensorInfo) -> None:
        super().__init__(info.shape, info.kind.name, info.nbytes)
        self._file, self._info = file, info

    def raw(self) -> torch.Tensor:
        """The blocks as they lie in the file: uint8, one row of bytes per row of the tensor."""
        rows = math.prod(self.shape[:-1])
        return self._file.tensor(self._info.start, torch.uint8, (rows, self.nbytes // rows))

    def read(self) -> torch.Tensor:
        values = torch.empty(self.shape, dtype=torch.float32)
        blocks, flat = self.raw().numpy(), values.view(-1, self.shape[-1]).numpy()
        step = max(1, _SLICE // self.shape[-1])
        try:
            for start in range(0, len(blocks), step):
                flat[start : start + step] = _dequantize(blocks[start : start + step], self._info.kind)
        except NotImplementedError:
            raise CheckpointError(
                self._file.path, f"tensor {self._info.name} is {self.kind}, which the gguf package can't dequantise"
            ) from None
        return values

    def release(self) -> None:
        self._file.release(self._info.start, self.nbytes)


def _dequantize(blocks: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = gguf.dequantize(blocks, kind)
    return values


def _config(path: Path, pairs: Mapping[str, Any], tensors: Mapping[str, Stored], factors: Stored | None) -> ModelConfig:
    architecture = pairs.get("general.architecture")
    if architecture not in ROPE_LAYOUTS:
        raise CheckpointError(
            path, f"architecture {architecture} is not supported; these are: {', '.join(ROPE_LAYOUTS)}"
        )
    fields = _Keys(path, pairs, architecture)
    if fields.either(0, "expert_count") > 0:
        raise CheckpointError(path, "mixtures of experts are not supported")
    dim, n_heads = fields.count("embedding_length"), fields.count("attention.head_count")
    head_dim = fields.either(dim // n_heads, "attention.key_length")
    if fields.either(head_dim, "rope.dimension_count") != head_dim:
        raise CheckpointError(path, f"RoPE over a part of the head's {head_dim} dimensions is not supported")
    theta = fields.either(10000.0, "rope.freq_base")
    return ModelConfig(
        architecture=architecture,
        dim=dim,
        n_layers=fields.count("block_count"),
        n_heads=n_heads,
        n_kv_heads=fields.either(n_heads, "attention.head_count_kv"),
        head_dim=head_dim,
        hidden_dim=fields.count("feed_forward_length"),
        vocab_size=_vocab_size(path, tensors),
        context_length=fields.count("context_length"),
        norm_eps=fields.need(float, "attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_layout="half" if ROPE_LAYOUTS[architecture] == "half" else "interleaved",
        rope_scaling=_rope_scaling(fields, factors, theta, head_dim),
        tied="output.weight" not in tensors,
        qkv_bias="layers.0.attention.wq.bias" in tensors,
        output_bias="layers.0.attention.wo.bias" in tensors,
        ffn_bias="layers.0.feed_forward.w1.bias" in tensors,
        embedding_multiplier=fields.either(1.0, "embedding_scale"),
        attention_multiplier=fields.get(float, "attention.scale"),
        residual_multiplier=fields.either(1.0, "residual_scale"),
        logits_scaling=fields.either(1.0, "logit_scale"),
    )


class _Keys(Fields):
    """`<architecture>.*` keys; a per-layer list counts as its value if all layers agree."""

    def __init__(self, path: Path, pairs: Mapping[str, Any], architecture: str) -> None:
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): pairs[key] for key in pairs if key.startswith(prefix)}
        for key, value in own.items():
            if isinstance(value, list):
                if len(set(value)) != 1:
                    raise CheckpointError(path, f"{prefix}{key} differs between layers, which is not supported")
                own[key] = value[0]
        super().__init__(path, own)


def _vocab_size(path: Path, tensors: Mapping[str, Stored]) -> int:
    if "tok_embeddings.weight" not in tensors:
        raise CheckpointError(path, "tensor token_embd.weight is missing")
    return tensors["tok_embeddings.weight"].shape[0]


def _rope_scaling(fields: _Keys, factors: Stored | None, theta: float, head_dim: int) -> RopeScaling | None:
    """From rope_freqs.weight, which divides each frequency, or from the key-values."""
    if factors is not None:
        original = fields.either(8192, "rope.scaling.original_context_length")
        return _from_factors(fields.path, factors, theta, head_dim, original)
    kind = fields.values.get("rope.scaling.type", "linear")
    factor = fields.get(float, "rope.scaling.factor", "rope.scale_linear")
    if kind == "none" or factor in (None, 0.0, 1.0):
        return None
    if kind != "linear":
        raise CheckpointError(fields.path, f"RoPE scaling {kind} is not supported; linear and Llama 3's are")
    return RopeScaling(kind="linear", factor=float(factor if factor is not None else 1.0))


def _from_factors(path: Path, factors: Stored, theta: float, head_dim: int, original: int) -> RopeScaling | None:
    """Llama 3's rule, if it gives these factors; else the factors themselves."""
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(path, f"tensor rope_freqs.weight has shape {factors.shape}, expected {(head_dim // 2,)}")
    given = factors.read().to(torch.float64)
    if bool((given == 1.0).all()):
        return None
    scaling = RopeScaling(kind="llama3", factor=float(given.max()), original_context_length=original)
    if torch.allclose(given, _llama3_factors(scaling, theta, head_dim), rtol=1e-3):
        return scaling
    return RopeScaling(kind="factors", factor=1.0, factors=tuple(given.tolist()))


def _llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> torch.Tensor:
    """What llama.cpp's converter writes: long waves divided by `factor`, short ones kept, a ramp between."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0.0, 1.0)
    return 1.0 / ((1 - ramp) / scaling.factor + ramp)
