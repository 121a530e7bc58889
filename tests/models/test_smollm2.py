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
    return Runner(model, KVCache(checkpoint.config, len(ASKED) + len(RAW), 128, dtype=torch.float32))


def greedy(runner: Runner, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """NEW tokens after each prompt (R, NEW), decoded together, and the logits (R, NEW, V) they were chosen from."""
    rows = range(len(prompts))
    first = [runner.forward([Segment(r, 0, len(prompts[r]))], prompts[r], [len(prompts[r]) - 1]) for r in rows]
    logits = [torch.cat(first)]
    while len(logits) < NEW:
        segments = [Segment(r, len(prompts[r]) + len(logits) - 1, 1) for r in rows]
        logits.append(runner.forward(segments, logits[-1].argmax(-1).tolist(), list(rows)))
    return torch.stack([step.argmax(-1) for step in logits], 1), torch.stack(logits, 1)


def test_greedy_tokens_are_transformers(checkpoint: Checkpoint, tokenizer: Tokenizer, runner: Runner) -> None:
    """transformers reads our whole answer at once: what it would have chosen at each step, we chose."""
    prompts = [tokenizer.encode(text, special=True) for text in (*map(chat, ASKED), *RAW)]
    chosen, ours = greedy(runner, prompts)
    peer = peer_model(checkpoint.config, {name: stored.read() for name, stored in checkpoint.tensors.items()})
    worst, ties, disagreements = 0.0, 0, []
    for row, prompt in enumerate(prompts):
        theirs = peer_logits(peer, prompt + chosen[row].tolist())[len(prompt) - 1 : -1]
        worst = max(worst, (ours[row] - theirs).abs().max().item())
        for step, token in enumerate(chosen[row].tolist()):
            best = theirs[step].topk(2)
            if token == best.indices[0]:
                continue
            ties += 1
            if token != best.indices[1] or best.values[0] - best.values[1] > TIE:
                disagreements.append((tokenizer.decode(prompt), step, tokenizer.decode([token])))
    print(f"smollm2: max logit error {worst:.1e} over {chosen.numel()} steps, {ties} near ties chosen otherwise")
    assert not disagreements
    assert worst < 1e-3, worst  # logits reach 40; measured 2e-4
