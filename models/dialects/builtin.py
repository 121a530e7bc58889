"""The formats of Llama 2 and Llama 3 chat models, for checkpoints that bring no template of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from models.dialects.template import TemplateSource

if TYPE_CHECKING:
    from models.tokenizers import Tokenizer

# https://github.com/meta-llama/llama, llama/generation.py: chat_completion
LLAMA2 = TemplateSource(
    """\
{%- if messages and messages[0].role == 'system' %}
    {%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- if not turns %}{{ raise_exception('A conversation needs a user message.') }}{% endif %}
{%- for message in turns %}
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('After an optional system message, roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- set content = (system if loop.first else '') + message.content %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "the built-in Llama 2 template",
)

# https://github.com/meta-llama/llama-models, models/llama3/chat_format.py
LLAMA3 = TemplateSource(
    """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}""",
    "the built-in Llama 3 template",
)

# whole words only: a folder called "torchchat" makes no chat model
_CHAT = re.compile(r"(?<![a-z])(chat|instruct)(?![a-z])", re.IGNORECASE)
_LLAMA = re.compile(r"llama", re.IGNORECASE)


def recognise(tokenizer: Tokenizer, names: Iterable[str]) -> TemplateSource | None:
    """The built-in format of a model called by any of `names` (its file, folders, metadata); None for a base model.

    Control tokens tell Llama 3, and the name that it was tuned to chat. Llama 2 has no control tokens of its own, so
    that one name must say both.
    """
    special = tokenizer.special_tokens
    chat_names = [name for name in names if _CHAT.search(name)]
    if {"<|start_header_id|>", "<|eot_id|>"} <= special.keys():
        return LLAMA3 if chat_names else None
    sentencepiece = tokenizer.strips_first_space and {"<s>", "</s>"} <= special.keys()
    return LLAMA2 if sentencepiece and any(_LLAMA.search(name) for name in chat_names) else None
