"""Linear layers that keep nn.Linear's signature over other stores of the weight, and what --quantize may say.

PackedLinear   float weights in oneDNN's blocked layout (CPU): no repacking per call, and the same bits for a row
               whatever the number of rows
Int8Linear     int8 rows, one scale each
Int4Linear     4-bit groups, scale and offset each
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import SetupError
from models import kernels

GROUPS = (32, 64, 128, 256)
_SLICE = 2**18  # weights quantized at a time


class PackedLinear(nn.Module):
    """x @ weight.T + bias with the weight packed once by oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # a buffer, so that the compiler sees a constant
        self.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(weight, None), persistent=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    @staticmethod
    def available(weight: Tensor) -> bool:
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return False
        # oneDNN takes bfloat16 from AVX-512 on; elsewhere torch's own kernel does it
        bfloat16 = weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return weight.dtype == torch.float32 or bfloat16


class Int8Linear(nn.Module):
    """Symmetric int8 weights, one float32 scale per output row."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        values, scale = _by_rows(weight, _to_int8)
        self.register_buffer("weight", values)
        self.register_buffer("scale", scale[:, 0])
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return linear_int8(x, self.weight, self.scale, bias=self.bias)
        weight, scale = self.weight.to(x.dtype), self.scale
        if x.dtype == torch.float16:  # sums of products with -127..127 would pass its largest number, 65504
            weight, scale = weight / 128, scale * 128
        y = F.linear(x, weight) * scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


class Int4Linear(nn.Module):
    """Two weights to a byte; each group of inputs has a float16 scale and offset: w = q * scale + offset, q 0..15.

    The offset is the group's smallest weight and 15 scales reach its largest. Against a scale alone (q -8..7) this
    has 10 to 20 % less error on real weights, and none on those that come from GGUF's Q4_1, which are made so.
    float16 instead of float32 adds no measurable error and saves one of six bits per weight at groups of 32.
    """

    weight: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, group: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group = group
        packed, scale, offset = _by_rows(weight, lambda rows: _to_int4(rows.unflatten(1, (-1, group))))
        self.register_buffer("weight", packed)
        self.register_buffer("scale", scale)
        self.register_buffer("offset", offset)
        self.bias = bias

    def dequantize(self) -> Tensor:
        """(out, in) float32."""
        return kernels.unpack_int4(self.weight, self.scale, self.offset)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return linear_int4(x, self.weight, self.scale, self.offset, bias=self.bias)
        return F.linear(x, self.dequantize().to(x.dtype), self.bias)


class Int8Embedding(nn.Module):
    """A lookup table of int8 rows, one scale per group of each row (the whole row when group is 0)."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, group: int) -> None:
        super().__init__()
        width = group if group else weight.shape[1]
        values, scale = _by_rows(weight, lambda rows: _to_int8(rows.unflatten(1, (-1, width))))
        self.register_buffer("weight", values)
        self.register_buffer("scale", scale)
        self.dtype = weight.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.weight[tokens].float() * self.scale[tokens]).flatten(-2).to(self.dtype)


class Kernel:
    """A function of models.kernels; to the compiler, which can't look into it, an operator."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        names = inspect.signature(function).parameters
        inputs = ", ".join(f"Tensor{'?' if name == 'bias' else ''} {name}" for name in names)
        name = f"torchchat::{function.__name__}"
        self.operator = torch.library.custom_op(name, function, mutates_args=(), schema=f"({inputs}) -> Tensor")
        self.operator.register_fake(lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]))

    def __call__(self, x: Tensor, *weights: Tensor, bias: Tensor | None) -> Tensor:
        """In float32 whatever x is, in x's dtype again."""
        run = self.operator if torch.compiler.is_compiling() else self.function
        return run(x.float().contiguous(), *weights, None if bias is None else bias.float()).to(x.dtype)


linear_int8, linear_int4 = Kernel(kernels.linear_int8), Kernel(kernels.linear_int4)


def _by_rows(weight: Tensor, quantize: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    """What `quantize` makes of the float32 rows, some at a time: its temporaries would be several times the weight."""
    parts = [quantize(rows.float()) for rows in weight.split(max(1, _SLICE // weight.shape[1]))]
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


def _to_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values, and a scale for each last dimension."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (values / scale).round().to(torch.int8), scale


def _to_int4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, groups, group) to bytes (out, in / 2), scale and offset (out, groups, 1)."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    smallest = torch.finfo(torch.float16).smallest_normal / 1024  # that float16 can tell from zero
    scale, offset = ((high - low) / 15).clamp(min=smallest).half(), low.half()
    q = ((groups - offset) / scale).round().clamp(0, 15).to(torch.uint8).flatten(1)
    return kernels.pack_int4(q), scale, offset


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

    JSON keys: linear:int8 {bitwidth 8, groupsize 0}, linear:int4 {bitwidth 4, groupsize}, embedding {bitwidth 8,
    groupsize}, precision {dtype}, executor {accelerator}.
    """
    if text is None:
        return Quantization()
    if text == "int8":
        return Quantization(linear="int8")
    if text == "int4":
        return Quantization(linear="int4", group=GROUPS[0])
    if not text.lstrip().startswith("{"):
        text = _read(text)
    try:
        schemes = json.loads(text)
    except ValueError as error:
        raise _wrong(f"not valid JSON: {error}") from None
    if not isinstance(schemes, dict) or not all(isinstance(v, dict) for v in schemes.values()):
        raise _wrong('expected an object of objects, such as {"linear:int4": {"groupsize": 32}}')
    return _from_schemes(schemes)


def _wrong(problem: str) -> SetupError:
    return SetupError(f"--quantize: {problem}.", param="quantize")


def _read(name: str) -> str:
    path = Path(name)
    try:
        if not path.is_file():
            raise _wrong(f"{name!r} is neither int8, int4, JSON nor a file holding JSON")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"{name!r} can't be read: {error}") from None


def _from_schemes(schemes: dict[str, dict[str, Any]]) -> Quantization:
    fields: dict[str, Any] = {}
    for name, given in schemes.items():
        if name not in _SCHEMES:
            raise _wrong(f"unknown scheme {name!r}; known are {', '.join(_SCHEMES)}")
        allowed, build = _SCHEMES[name]
        for key, value in given.items():
            if key not in allowed:
                raise _wrong(f"{name} takes {', '.join(allowed)}, not {key!r}")
            if not any(type(value) is type(known) and value == known for known in allowed[key]):
                raise _wrong(f"{name} {key} must be {_one_of(allowed[key])}, got {json.dumps(value)}")
        if "linear" in fields and name.startswith("linear"):
            raise _wrong(f"{name} and linear:{fields['linear']} were given; choose one linear scheme")
        fields |= build(given)
    return Quantization(**fields)


def _one_of(values: tuple[Any, ...]) -> str:
    return " or ".join(json.dumps(value) for value in values)


# scheme -> (its keys and their allowed values; the Quantization fields it sets)
_SCHEMES: dict[str, tuple[dict[str, tuple[Any, ...]], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "linear:int8": ({"bitwidth": (8,), "groupsize": (0, None)}, lambda g: {"linear": "int8"}),
    "linear:int4": (
        {"bitwidth": (4,), "groupsize": GROUPS},
        lambda g: {"linear": "int4", "group": g.get("groupsize", GROUPS[0])},
    ),
    "embedding": (
        {"bitwidth": (8,), "groupsize": (0, None, *GROUPS)},
        lambda g: {"embedding": True, "embedding_group": g.get("groupsize") or 0},
    ),
    "precision": (
        {"dtype": ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16")},
        lambda g: {"dtype": g.get("dtype")},
    ),
    "executor": ({"accelerator": ("cpu", "cuda", "mps")}, lambda g: {"device": g.get("accelerator")}),
}


def require_groups(model: nn.Module, quantization: Quantization) -> None:
    """Raise SetupError when a group size does not divide a width of `model` (still float, maybe without memory)."""
    linears = {name: m.in_features for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    tables = {name: m.embedding_dim for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    _require(linears, f"linear:{quantization.linear}", quantization.group)
    _require(tables, "embedding", quantization.embedding_group)


def _require(widths: dict[str, int], scheme: str, group: int) -> None:
    for name, width in widths.items():
        if group and width % group:
            fitting = [str(g) for g in GROUPS if all(w % g == 0 for w in widths.values())]
            advice = f"{' or '.join(fitting)} does" if fitting else "no other size does; use int8 without groups"
            raise _wrong(f"{scheme} groupsize {group} does not divide the {width} inputs of {name}; {advice}")


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


def is_quantized(model: nn.Module) -> bool:
    """Whether any of the model's weights are stored quantized."""
    return any(isinstance(module, (Int8Linear, Int4Linear, Int8Embedding)) for module in model.modules())
