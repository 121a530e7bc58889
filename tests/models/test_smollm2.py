"""The real default model chooses the tokens that transformers chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.runner import Runner
from models.build import build_model
from models.cache import KVCache, Segment
from models.checkpoints import Checkpoint, open_checkpoint
from models.tokenizers import Tokenizer, load_tokenizer
from tests.peer import peer_logits, peer_model

pytestmark = pytest.mark.slow

NEW = 32
TIE = 1e-3  # where transformers' best two logits are closer, either may be chosen
ASKED = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "Give me three reasons to learn Python.",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 3?",
    "Tell me a story about a dog.",
    "List the planets of the solar system.",
    "Who wrote Hamlet, and when?",
    "Write a function that reverses a string.",
)
RAW = (
    "Once upon a time",
    "The quick brown fox",
    "def fibonacci(n):\n",
    "In 1969, the first",
    "import numpy as np\n\n",
    "Dear Sir or Madam,\n\n",
    "The three laws of motion are",
    "Ingredients:\n- 200 g flour\n-",
    "1, 1, 2, 3, 5, 8,",
    "Zürich ist eine Stadt",
)


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(checkpoint, None)


@pytest.fixture(scope="module")
def runner(checkpoint: Checkpoint) -> Runner:
    model = build_model(checkpoint, dtype=torch.float32, context_length=128)
    return Runner(model, KVCache(checkpoint.config, 1, 128, dtype=torch.float32))


def greedy(runner: Runner, prompt: list[int]) -> tuple[list[int], Tensor]:
    """NEW tokens, decoded one by one, and the logits that each was chosen from."""
    tokens, logits = list(prompt), []
    step, start = tokens, 0
    for _ in range(NEW):
        last = runner.forward([Segment(0, start, len(step))], step, [len(step) - 1])
        logits.append(last)
        start += len(step)
        step = [int(last.argmax())]
        tokens += step
    return tokens[len(prompt) :], torch.cat(logits)


def test_greedy_tokens_are_transformers(checkpoint: Checkpoint, tokenizer: Tokenizer, runner: Runner) -> None:
    """transformers reads our whole answer at once: what it would have chosen at each step, we chose."""
    tensors = {name: stored.read().clone() for name, stored in checkpoint.tensors.items()}
    peer = peer_model(checkpoint.config, tensors)
    worst, ties, disagreements = 0.0, 0, []
    for text in [chat(question) for question in ASKED] + list(RAW):
        prompt = tokenizer.encode(text, special=True)
        chosen, ours = greedy(runner, prompt)
        theirs = peer_logits(peer, prompt + chosen)[len(prompt) - 1 : -1]
        worst = max(worst, (ours - theirs).abs().max().item())
        best = theirs.topk(2).values
        for step, token in enumerate(chosen):
            if token == theirs[step].argmax():
                continue
            ties += 1
            if best[step, 0] - theirs[step, token] > TIE or best[step, 0] - best[step, 1] > TIE:
                disagreements.append((text, step, tokenizer.decode([token])))
    print(f"smollm2: max logit error {worst:.1e} over {20 * NEW} steps, {ties} near ties chosen otherwise")
    assert not disagreements
    assert worst < 1e-3, worst  # logits are up to 40; measured 1e-4
