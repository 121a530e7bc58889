"""Logits to token ids: pure functions on (B, V), one row per sequence.

Order: penalties and bias, temperature, top_k, top_p, min_p. A row's choice depends on that row alone: every filter is
a threshold on the row's own probabilities (ties at the threshold stay in), and the one random number it uses is
`uniform(seed, choice, position)`, which no other row shares. temperature 0, top_k 1, top_p 0 and min_p 1 take the
likeliest token, the first of equals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.types import SamplingParams, TopLogprobs

_MASK = (1 << 64) - 1
_TOP = 256  # likeliest tokens looked at first for top_p; nearly always enough


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: three rounds of splitmix64 (Steele et al., 2014)."""
    state = 0
    for word in (seed, choice, position):
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 32) / 2**32


def usable(logits: Tensor) -> list[bool]:
    """Whether each row of (B, V) can be sampled from: no NaN, no +inf, and something above -inf."""
    return logits.amax(-1).isfinite().tolist()


def adjusts(params: SamplingParams) -> bool:
    """Whether `adjust` would ever change a row."""
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.min_tokens
    )


def adjust(logits: Tensor, params: SamplingParams, prompt: Tensor, counts: Tensor, banned: Sequence[int]) -> Tensor:
    """One row (V,) after penalties, bias and bans; `logits` is left alone.

    prompt (V,) bool: tokens of the prompt. counts (V,): how often each was generated. banned: ids that may not come
    (end tokens before min_tokens). Repetition divides as in CTRL (arXiv 1909.05858), the others subtract as in the
    OpenAI specification.
    """
    seen = prompt | (counts > 0)
    penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    row = torch.where(seen, penalised, logits)
    row = row - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
    for token_id, bias in params.logit_bias.items():
        row[token_id] += bias
    row[list(banned)] = float("-inf")
    return row


def choose(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """One token id per row of (B, V) `usable` adjusted logits."""
    likeliest = logits.argmax(-1).tolist()
    drawing = [i for i, p in enumerate(params) if not _is_greedy(p)]
    if drawing:
        rows = logits if len(drawing) == len(params) else logits[drawing]
        drawn = _draw(rows, [params[i] for i in drawing], [uniforms[i] for i in drawing])
        for i, token_id in zip(drawing, drawn, strict=True):
            likeliest[i] = token_id
    return likeliest


def _is_greedy(p: SamplingParams) -> bool:
    return p.temperature == 0 or p.top_k == 1 or p.top_p == 0 or p.min_p == 1


def _draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """Invert each row's cumulative distribution, in the order of the ids, at its uniform number."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    # Subtracting the maximum first keeps tiny temperatures finite.
    scaled = (logits - logits.amax(-1, keepdim=True)) / column([p.temperature for p in params]).clamp(min=1e-6).float()
    probabilities = scaled.softmax(-1)
    threshold = column([p.min_p for p in params]).float() * probabilities.amax(-1, keepdim=True)
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        vocabulary = logits.shape[1]
        top_k = [min(p.top_k, vocabulary) if p.top_k > 0 else vocabulary for p in params]
        threshold = torch.maximum(threshold, _nucleus(probabilities, top_k, column([p.top_p for p in params])))
    kept = probabilities.masked_fill(probabilities < threshold, 0)
    cumulative = kept.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, column(uniforms) * cumulative[:, -1:], right=True).flatten().tolist()


def _nucleus(probabilities: Tensor, top_k: Sequence[int], top_p: Tensor) -> Tensor:
    """The smallest probability that top_k (at most the vocabulary) and then top_p keep, (B, 1).

    Sorting a vocabulary is dear, so the few likeliest are tried first, and all only if some row's nucleus is wider.
    """
    vocabulary = probabilities.shape[1]
    limit = torch.tensor(top_k, device=probabilities.device)[:, None]
    unfiltered = (limit == vocabulary) & (top_p >= 1)
    width = min(vocabulary, max([_TOP, *(k for k in top_k if k < vocabulary)]))
    while True:
        likeliest = probabilities.topk(width).values  # (B, width), falling
        reached = likeliest.double().cumsum(-1)
        whole = torch.where(limit < vocabulary, reached.gather(1, limit.clamp(max=width) - 1), 1.0)
        last = torch.minimum((reached < top_p * whole).sum(-1, keepdim=True), limit - 1).masked_fill(unfiltered, 0)
        if width == vocabulary or int(last.max()) < width:
            return likeliest.gather(1, last.clamp(max=width - 1)).masked_fill(unfiltered, 0)
        width = vocabulary


def logprobs(logits: Tensor, token_id: int, top: int) -> tuple[float, TopLogprobs]:
    """Log-probability of `token_id`, and the `top` likeliest ids, in one raw row (V,): no temperature, no penalties."""
    row = logits.float().log_softmax(-1)
    if top == 0:
        return float(row[token_id]), ()
    values, ids = row.topk(min(top, row.shape[0]))
    return float(row[token_id]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
