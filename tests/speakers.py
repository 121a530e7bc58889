"""Whole tiny models that can talk: random weights, a real tokenizer and, for chat, a template."""

from __future__ import annotations

import io
import json
from pathlib import Path

from tests import tiny

TEXTS = ["Once upon a time there was a little dog.", "hello world, tell me a story about a dog"] * 8
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END = 0, 1  # ids of <|im_start|> and <|im_end|>


def write_chat_model(folder: Path, context_length: int = 2048) -> Path:
    """A Hugging Face folder: byte-level BPE, a ChatML template, <|im_end|> ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS, trainer)
    config = tiny.tiny_config(vocab_size=library.get_vocab_size(), context_length=context_length)
    tiny.write_hf(folder, config, tiny.random_tensors(config))
    library.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_story_model(folder: Path) -> Path:
    """llama2.c's stories.bin with a sentencepiece tokenizer.model beside it: no template, BOS in front."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    size = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()
    config = tiny.tiny_config(vocab_size=size, context_length=256)
    return tiny.write_llama2c(folder / "stories.bin", config, tiny.random_tensors(config))
