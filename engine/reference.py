"""Generation as slow and obvious as it can be: what the engine must equal (invariant 12).

No cache, no batch, no chunks: every step computes the whole sequence again with textbook attention, and sampling
sorts the vocabulary and walks it in Python. Shared with the engine are the model's weights and `uniform`, no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.sampling import uniform
from engine.types import FinishReason, Request, SamplingParams, TopLogprobs, Usage
from models.transformer import Transformer


@dataclass(slots=True)
class Generated:
    """A whole completion. `tokens` has every sampled id, the end token included.

    `margins[i]` is how near the i-th choice was to being another: the distance to the nearest decision, in logits for
    a greedy choice and in probability for a drawn one. Below rounding error, another token would be right too.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, TopLogprobs] | None] | None = None
    finish: FinishReason = "length"
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))


def reference_generate(
    model: Transformer, request: Request, *, context_length: int, eos_ids: frozenset[int] = frozenset()
) -> Generated:
    """What the engine gives for `request`, which is greedy or has a seed; its cache never holds anything."""
    params, prompt, result = request.params, list(request.prompt), Generated()
    stop_ids = params.stop_ids if params.ignore_eos else params.stop_ids | eos_ids
    limit = context_length - len(prompt)
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    if request.prompt_logprobs is not None:
        result.prompt_logprobs = [None]
        for row, following in zip(logits(model, prompt)[:-1].tolist(), prompt[1:], strict=True):
            result.prompt_logprobs.append(scored(row, following, request.prompt_logprobs))
    while len(result.tokens) < limit:
        raw: list[float] = logits(model, prompt + result.tokens)[-1].tolist()
        banned = stop_ids if len(result.tokens) < params.min_tokens else frozenset()
        seed = 0 if params.seed is None else params.seed
        number = uniform(seed, request.choice, len(result.tokens))
        token, margin = chosen(adjusted(raw, params, prompt, result.tokens, banned), params, number)
        logprob, top = scored(raw, token, 0 if params.logprobs is None else params.logprobs)
        result.tokens.append(token)
        result.logprobs.append(logprob)
        result.top_logprobs.append(top)
        result.margins.append(margin)
        if token in stop_ids:
            result.finish = "stop"
            break
    result.usage = Usage(len(prompt), len(result.tokens), 0)
    return result


@torch.inference_mode()
def logits(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """The logits (N, V) after each of `tokens`, each seeing itself and those before it."""
    config = model.config
    group = config.n_heads // config.n_kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # (N, H, E)
        scores = torch.einsum("qhe,khe->hqk", q, k) * config.attention_scale
        unseen = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
        return torch.einsum("hqk,khe->qhe", weights, v)

    device = model.norm.weight.device
    ids, positions = torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device)
    return model(ids, positions, None, attend)


def softmax(row: Sequence[float]) -> list[float]:
    highest = max(row)
    weights = [math.exp(x - highest) for x in row]
    total = math.fsum(weights)
    return [w / total for w in weights]


def scored(row: Sequence[float], token: int, top: int) -> tuple[float, TopLogprobs]:
    """Log-probability of `token` and of the `top` likeliest ids under raw logits."""
    highest = max(row)
    total = highest + math.log(math.fsum(math.exp(x - highest) for x in row))
    likeliest = sorted(range(len(row)), key=lambda i: -row[i])[:top]
    return row[token] - total, tuple((i, row[i] - total) for i in likeliest)


def adjusted(
    row: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], banned: frozenset[int]
) -> list[float]:
    """Logits after penalties (CTRL's for prompt and output, OpenAI's for output), bias and bans."""
    result = list(row)
    for i in {*prompt, *output}:
        result[i] = row[i] / params.repetition_penalty if row[i] > 0 else row[i] * params.repetition_penalty
    for i in set(output):
        result[i] -= params.presence_penalty + params.frequency_penalty * output.count(i)
    for i, bias in params.logit_bias.items():
        result[i] += bias
    for i in banned:
        result[i] = -math.inf
    return result


def chosen(row: Sequence[float], params: SamplingParams, number: float) -> tuple[int, float]:
    """The token that `number` of [0, 1) stands for, and its margin (see Generated)."""
    falling = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if params.temperature == 0 or params.top_k == 1 or params.top_p == 0 or params.min_p == 1:
        return falling[0], row[falling[0]] - row[falling[1]]
    temperature = max(params.temperature, 1e-6)
    probabilities = softmax([(x - row[falling[0]]) / temperature for x in row])
    threshold, margin = kept_from([probabilities[i] for i in falling], params)
    kept = [i for i in range(len(row)) if probabilities[i] >= threshold]
    total = math.fsum(probabilities[i] for i in kept)
    margin = min([margin, *(abs(p - threshold) for p in probabilities if p != threshold)])
    reached = 0.0
    token = None
    for i in kept:
        reached += probabilities[i] / total
        margin = min(margin, abs(reached - number))
        if token is None and reached > number:
            token = i
    return kept[-1] if token is None else token, margin


def kept_from(falling: Sequence[float], params: SamplingParams) -> tuple[float, float]:
    """The least probability that top_k, then top_p among those, then min_p keep, and how near top_p was to another."""
    count = params.top_k if 0 < params.top_k < len(falling) else len(falling)
    margin, threshold = 1.0, falling[count - 1]
    if params.top_p < 1:
        goal, reached = params.top_p * math.fsum(falling[:count]), 0.0
        for probability in falling[:count]:
            reached += probability
            margin = min(margin, abs(reached - goal))
            if reached >= goal:
                threshold = probability
                break
    return max(threshold, params.min_p * falling[0]), margin
