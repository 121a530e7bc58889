"""Linear layers that keep nn.Linear's signature over other stores of the weight, and what --quantize may say.

PackedLinear   float weights in oneDNN's blocked layout (CPU): no repacking per call, and the same bits for a row
               whatever the number of rows
Int8Linear     int8 rows, one scale each
Int4Linear     4-bit groups, scale and offset each
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import SetupError

GROUPS = (32, 64, 128)


class PackedLinear(nn.Module):
    """x @ weight.T + bias with the weight packed once by oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    @staticmethod
    def available(weight: Tensor) -> bool:
        return (
            weight.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.bfloat16)
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        )


class Int8Linear(nn.Module):
    """Symmetric int8 weights, one float32 scale per output row."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        wide = weight.float()
        scale = wide.abs().amax(1).clamp(min=1e-12) / 127
        self.register_buffer("weight", (wide / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


class Int4Linear(nn.Module):
    """Two weights to a byte; each group of inputs has a scale and an offset: w = q * scale + offset, q 0..15."""

    weight: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, group: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        if self.in_features % group:
            raise SetupError(f"--quantize int4: {self.in_features} inputs do not divide into groups of {group}.")
        self.group = group
        groups = weight.float().unflatten(1, (-1, group))  # (out, groups, group)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (high - low).clamp(min=1e-12) / 15
        q = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8).flatten(1)
        self.register_buffer("weight", q[:, 0::2] | (q[:, 1::2] << 4))
        self.register_buffer("scale", scale)
        self.register_buffer("offset", low)
        self.bias = bias

    def dequantize(self) -> Tensor:
        """(out, in) float32."""
        q = torch.stack((self.weight & 15, self.weight >> 4), -1).flatten(1)
        groups = q.float().unflatten(1, (-1, self.group))
        return (groups * self.scale + self.offset).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize().to(x.dtype), self.bias)


class Int8Embedding(nn.Module):
    """A lookup table of int8 rows, one scale per group of each row (the whole row when group is 0)."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, group: int) -> None:
        super().__init__()
        groups = weight.float().unflatten(1, (-1, group if group else weight.shape[1]))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("weight", (groups / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.dtype = weight.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.weight[tokens].float() * self.scale[tokens]).flatten(-2).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Quantization:
    """What --quantize asks for. `dtype` and `device` come from torchchat's JSON; --dtype and --device win over them."""

    linear: Literal["int8", "int4"] | None = None
    group: int = 0  # int4's group size; 0: per row (int8)
    embedding: bool = False
    embedding_group: int = 0
    dtype: str | None = None
    device: str | None = None


def parse_quantization(text: str | None) -> Quantization:
    """`int8`, `int4`, torchchat's JSON, or the path of a file holding it. Raises SetupError naming what is wrong.

    JSON keys: linear:int8 {groupsize 0}, linear:int4 {groupsize}, embedding {bitwidth 8, groupsize}, precision {dtype},
    executor {accelerator}.
    """
    if text is None:
        return Quantization()
    if text in ("int8", "int4"):
        return Quantization(linear=text, group=32 if text == "int4" else 0)  # type: ignore[arg-type]
    source = Path(text)
    if not text.lstrip().startswith("{"):
        if not source.is_file():
            raise SetupError(f"--quantize: {text!r} is neither int8, int4, JSON nor a file holding JSON.")
        text = source.read_text()
    try:
        schemes = json.loads(text)
    except ValueError as error:
        raise SetupError(f"--quantize: not valid JSON: {error}.") from None
    if not isinstance(schemes, dict) or not all(isinstance(v, dict) for v in schemes.values()):
        raise SetupError('--quantize: expected an object of objects, such as {"linear:int8": {"groupsize": 0}}.')
    return _from_schemes(schemes)


def _from_schemes(schemes: dict[str, dict[str, Any]]) -> Quantization:
    fields: dict[str, Any] = {}
    for name, given in schemes.items():
        if name not in _SCHEMES:
            raise SetupError(f"--quantize: unknown scheme {name!r}; known are {', '.join(_SCHEMES)}.")
        allowed, build = _SCHEMES[name]
        for key, value in given.items():
            if key not in allowed:
                raise SetupError(f"--quantize: {name} takes {', '.join(allowed)}, not {key!r}.")
            if allowed[key] is not None and value not in allowed[key]:
                known = ", ".join(str(v) for v in allowed[key])
                raise SetupError(f"--quantize: {name} {key} must be one of {known}, got {value!r}.")
        if "linear" in fields and name.startswith("linear"):
            raise SetupError("--quantize: only one linear scheme can be given.")
        fields |= build(given)
    return Quantization(**fields)


# scheme -> (its keys and their allowed values, None for any; the Quantization fields it sets)
_SCHEMES: dict[str, tuple[dict[str, tuple[Any, ...]], Any]] = {
    "linear:int8": ({"groupsize": (0, None)}, lambda g: {"linear": "int8", "group": 0}),
    "linear:int4": ({"groupsize": GROUPS}, lambda g: {"linear": "int4", "group": g.get("groupsize", 32)}),
    "embedding": (
        {"bitwidth": (8,), "groupsize": (0, None, *GROUPS)},
        lambda g: {"embedding": True, "embedding_group": g.get("groupsize", 0) or 0},
    ),
    "precision": (
        {"dtype": ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16")},
        lambda g: {"dtype": g.get("dtype")},
    ),
    "executor": ({"accelerator": ("cpu", "cuda", "mps")}, lambda g: {"device": g.get("accelerator")}),
}


def quantized_linear(weight: Tensor, bias: Tensor | None, quantization: Quantization) -> nn.Module:
    """The layer for one float weight (out, in)."""
    if quantization.linear == "int8":
        return Int8Linear(weight, bias)
    if quantization.linear == "int4":
        return Int4Linear(weight, bias, quantization.group)
    if PackedLinear.available(weight):
        return PackedLinear(weight, bias)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
