"""Where a checkpoint's dialect comes from."""

from __future__ import annotations

import json
import shutil

import pytest

from errors import CheckpointError
from models.dialects import load_dialect
from models.dialects.plain import PlainDialect
from models.dialects.template import TemplateDialect
from models.tokenizers import load_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def says(word):
    """A template that writes which one it is."""
    return f"{word}:{{{{ bos_token }}}}{{{{ messages[0].content }}}}{{{{ eos_token }}}}{{{{ 'T' if tools }}}}"


@pytest.fixture
def folder(tmp_path, hf_folder):
    shutil.copy(hf_folder / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.fixture
def render(spell, checkpoint_at):
    def render(folder, override=None, tools=None, **checkpoint):
        opened = checkpoint_at(folder, **checkpoint)
        tokenizer = load_tokenizer(opened) if "metadata" not in checkpoint else load_tokenizer(checkpoint_at(folder))
        return spell(tokenizer, load_dialect(opened, tokenizer, override).render(MESSAGES, tools=tools))

    return render


def write_config(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_the_order_of_places(folder, render, tmp_path):
    assert render(folder) == "hello"
    write_config(folder, chat_template=says("config"), eos_token="<|end|>")
    assert render(folder) == "config:hello«<|end|>»"
    (folder / "chat_template.jinja").write_text(says("file"))
    assert render(folder) == "file:hello«<|end|>»"
    other = tmp_path / "other.jinja"
    other.write_text(says("override"))
    assert render(folder, other) == "override:hello«<|end|>»"


def test_special_names_may_be_objects(folder, render):
    write_config(
        folder, chat_template=says("c"), bos_token={"content": "<s>", "lstrip": False}, eos_token={"content": "<|end|>"}
    )
    assert render(folder) == "c:«<s>»hello«<|end|>»"


def test_template_lists(folder, render):
    templates = [{"name": "default", "template": says("plain")}, {"name": "tool_use", "template": says("tools")}]
    write_config(folder, chat_template=templates)
    assert render(folder).startswith("plain:hello")
    assert render(folder, tools=TOOLS).startswith("tools:hello")
    assert render(folder, tools=TOOLS).endswith("T")


def test_gguf_metadata_is_all_a_gguf_file_says(folder, render):
    write_config(folder, chat_template=says("config"))
    (folder / "chat_template.jinja").write_text(says("file"))
    metadata = {"tokenizer.chat_template": says("gguf"), "tokenizer.ggml.eos_token_id": 5}
    assert render(folder, format="gguf", metadata=metadata) == "gguf:hello«<|end|>»"
    metadata["tokenizer.chat_template.tool_use"] = says("gguf-tools")
    assert render(folder, format="gguf", metadata=metadata, tools=TOOLS).startswith("gguf-tools:hello")
    assert render(folder, format="gguf", metadata={"general.name": "stories"}) == "hello"


def test_llama3_by_control_tokens_and_name(tiktoken_folder, tmp_path, checkpoint_at):
    base = tmp_path / "torchchat" / "Llama3.2-1B"
    base.mkdir(parents=True)
    shutil.copy(tiktoken_folder / "tokenizer.model", base)
    for folder, kind in ((tiktoken_folder, TemplateDialect), (base, PlainDialect)):
        checkpoint = checkpoint_at(folder)
        dialect = load_dialect(checkpoint, load_tokenizer(checkpoint))
        assert type(dialect) is kind
        assert dialect.is_chat is (kind is TemplateDialect)
    named = checkpoint_at(base, metadata={"general.name": "Llama 3.2 1B Instruct"})
    assert load_dialect(named, load_tokenizer(checkpoint_at(base))).is_chat


@pytest.mark.parametrize(
    ("name", "chat"),
    [
        ("Llama-2-7b-chat-hf", True),
        ("llama2_7b_chat", True),
        ("stories15M", False),
        ("llama-2-7b", False),
        ("mistral-7b-instruct", False),
        ("torchchat/llama", False),
    ],
)
def test_llama2_by_sentencepiece_and_name(name, chat, sp_folder, tmp_path, checkpoint_at, spell):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    shutil.copy(sp_folder / "tokenizer.model", folder)
    checkpoint = checkpoint_at(folder)
    tokenizer = load_tokenizer(checkpoint)
    dialect = load_dialect(checkpoint, tokenizer)
    assert dialect.is_chat is chat
    expected = "«<s>» [INST] hello [/INST]" if chat else "«<s>» hello"
    assert spell(tokenizer, dialect.render(MESSAGES)) == expected


def test_the_name_may_be_a_hub_caches(sp_folder, tmp_path, checkpoint_at):
    folder = (
        tmp_path / "models--meta-llama--Llama-2-7b-chat-hf" / "snapshots" / "08751db2aca9bf2f7f80d2e516117a53d7450235"
    )
    folder.mkdir(parents=True)
    shutil.copy(sp_folder / "tokenizer.model", folder)
    checkpoint = checkpoint_at(folder)
    assert load_dialect(checkpoint, load_tokenizer(checkpoint)).is_chat


@pytest.mark.parametrize("template", [5, {"a": "b"}, [1], [{"template": "x"}], [{"name": "default", "template": 1}]])
def test_malformed_config_templates(template, folder, render):
    write_config(folder, chat_template=template)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .*chat_template"):
        render(folder)


def test_files_that_can_not_be_read(folder, render):
    with pytest.raises(CheckpointError, match=r"missing\.jinja: can't be read: No such file"):
        render(folder, folder / "missing.jinja")
    (folder / "latin.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"latin\.jinja: no UTF-8 text"):
        render(folder, folder / "latin.jinja")
    (folder / "chat_template.jinja").write_text("ok\n{% for %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: line 2 of the chat template"):
        render(folder)
