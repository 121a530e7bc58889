"""The Llama family in one file: GQA, RMSNorm, rotary positions, SwiGLU.

Tokens come flat: N tokens of any number of sequences, each with its own position. Only attention needs to know
which sequence a token belongs to, so it is passed in: `attend` writes the new keys and values into the cache and
reads what each query may see. Everything else works on rows, whatever their company.

Sizes in comments: N tokens, D dim, H query heads, K kv heads, E head_dim, F hidden_dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig, RopeScaling

# (layer, q (N,H,E), k (N,K,E), v (N,K,E)) -> (N,H,E)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention around the passed-in `attend`; wq, wk and wv lie in one matrix."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.wqkv = nn.Linear(config.dim, width, bias=config.qkv_bias)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=config.output_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        heads = self.wqkv(x).unflatten(-1, (-1, self.head_dim))  # (N, H+2K, E)
        turned = rotate(heads[:, : self.heads + self.kv_heads], cos, sin)
        q, k = turned.split((self.heads, self.kv_heads), dim=1)
        v = heads[:, self.heads + self.kv_heads :]
        return self.wo(attend(self.layer, q, k, v).flatten(1))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202); gate (w1) and up (w3) lie in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w13 = nn.Linear(config.dim, 2 * config.hidden_dim, bias=config.ffn_bias)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.residual = config.residual_multiplier

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x.add(self.attention(self.attention_norm(x), cos, sin, attend), alpha=self.residual)
        return x.add(self.feed_forward(self.ffn_norm(x)), alpha=self.residual)


class Transformer(nn.Module):
    """Token ids to logits. Weights are loaded by models.build; `context_length` positions have rotary angles."""

    def __init__(self, config: ModelConfig, context_length: int) -> None:
        super().__init__()
        self.config = config
        self.context_length = context_length
        # given a weight, it draws no random numbers, which on the meta device means importing the compiler
        table = torch.empty(config.vocab_size, config.dim)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, _weight=table, _freeze=True)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        # made again by build once the model leaves the meta device
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.empty(context_length, config.head_dim), persistent=False)
        self.register_buffer("sin", torch.empty(context_length, config.head_dim), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, select: Tensor | None, attend: Attend) -> Tensor:
        """Logits, float32, of the tokens whose indices are in `select` (all when None): (N,), (N,) -> (S, V)."""
        x = self.tok_embeddings(tokens) * self.config.embedding_multiplier  # (N, D)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)  # (N, 1, E)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        if select is not None:
            x = x[select]
        return self.output(self.norm(x)).float() / self.config.logits_scaling


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), written out: F.silu rounds otherwise at the ends of a thread's share, wherever these fall."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1)).type_as(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of (N, heads, E), dimension i paired with i + E/2."""
    wide = x.float()
    low, high = wide.chunk(2, -1)
    return (wide * cos).add_(torch.cat((high, low), -1).mul_(sin)).type_as(x)


def rope_angles(config: ModelConfig, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency for `rotate`, (length, E) each, float32; sin negative in its first half."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32)[: config.head_dim // 2] / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _scale(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """See RopeScaling. Llama 3.1 divides long wavelengths by `factor`, keeps short ones and blends between them."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    turns = scaling.original_context_length * frequencies / (2 * math.pi)  # turns within the original context
    blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / scaling.factor)
