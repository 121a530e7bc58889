"""The shape of a model, as one frozen value. Readers build it from whatever their format carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling (Meta's `use_scaled_rope`; HF `rope_type: llama3`), or plain division of positions
    (HF `linear`): kind "linear" uses `factor` alone. Kind "factors" (a GGUF's rope_freqs that don't follow Llama 3's
    rule) divides each of the head_dim / 2 frequencies by its own number of `factors`."""

    kind: Literal["llama3", "linear", "factors"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything Transformer needs to know. Sizes are counts of floats; `dim` is the residual width.

    rope_layout: how a head's dimensions pair up for rotation. "interleaved" pairs (0,1), (2,3), ... (Meta's
    weights, llama2.c, GGUF arch llama); "half" pairs (i, i + head_dim/2) (HF weights, GGUF arch qwen2).
    The multipliers are Granite's; 1.0 (and None for attention: head_dim ** -0.5) is every other model.
    """

    architecture: str  # "llama", "qwen2", "granite", ...: the name the file gave, for messages
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_layout: Literal["interleaved", "half"] = "interleaved"
    rope_scaling: RopeScaling | None = None
    tied: bool = False  # output.weight is tok_embeddings.weight
    qkv_bias: bool = False
    output_bias: bool = False  # on attention's wo
    ffn_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0  # logits are divided by it

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical tensor names and shapes: what a Checkpoint must offer, no more and no less.

        Meta's names. Linear weights are (out, in).
        """
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocab_size, self.dim)}
        for i in range(self.n_layers):
            p = f"layers.{i}."
            shapes |= {
                p + "attention_norm.weight": (self.dim,),
                p + "attention.wq.weight": (q, self.dim),
                p + "attention.wk.weight": (kv, self.dim),
                p + "attention.wv.weight": (kv, self.dim),
                p + "attention.wo.weight": (self.dim, q),
                p + "ffn_norm.weight": (self.dim,),
                p + "feed_forward.w1.weight": (self.hidden_dim, self.dim),  # gate
                p + "feed_forward.w2.weight": (self.dim, self.hidden_dim),  # down
                p + "feed_forward.w3.weight": (self.hidden_dim, self.dim),  # up
            }
            if self.qkv_bias:
                shapes |= {p + f"attention.{w}.bias": (n,) for w, n in (("wq", q), ("wk", kv), ("wv", kv))}
            if self.output_bias:
                shapes[p + "attention.wo.bias"] = (self.dim,)
            if self.ffn_bias:
                shapes |= {
                    p + "feed_forward.w1.bias": (self.hidden_dim,),
                    p + "feed_forward.w2.bias": (self.dim,),
                    p + "feed_forward.w3.bias": (self.hidden_dim,),
                }
        shapes["norm.weight"] = (self.dim,)
        if not self.tied:
            shapes["output.weight"] = (self.vocab_size, self.dim)
        return shapes
