"""Templates render as Hugging Face's do, in the sandbox, with exactly one BOS."""

from __future__ import annotations

import json
import shutil
from datetime import datetime

import pytest

from errors import CheckpointError, RequestError
from models.dialects.builtin import LLAMA2, LLAMA3
from models.dialects.template import TemplateDialect, TemplateSource

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# control tokens assembled around the role, as Phi and OLMo write them; `continue` needs loopcontrols
ASSEMBLED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'developer' %}{% continue %}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}<|assistant|>\n"
)
TOOLS_TEMPLATE = """\
{%- set today = strftime_now("%Y") %}
{{- bos_token }}<|im_start|>system
Year {{ today }}.
{%- if tools %}
    {%- for tool in tools %}
Tool: {{ tool | tojson }}
Indented: {{ tool.function.parameters | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
<|im_end|>
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant", "tool"] %}
        {{- raise_exception("No role " + message.role + " here, please") }}
    {%- endif %}
<|im_start|>{{ message.role }}
{% generation %}{{ message.content | trim if message.content else '' }}{% endgeneration %}
    {%- for call in message.tool_calls %}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>
    {%- endfor %}
<|im_end|>
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
"""
CONVERSATION = [
    {"role": "system", "content": " You are <b>terse</b> & 'kind'. "},
    {"role": "user", "content": "  Hello,\n\nworld "},
    {"role": "assistant", "content": "<think>\nhm</think> naïve 漢字 🤖"},
    {"role": "user", "content": "and then?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für <b>Städte</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def dialect_for(tokenizer, template, **names):
    return TemplateDialect(tokenizer, TemplateSource(template, "t.jinja"), names=names)


@pytest.fixture(scope="module")
def reference(hf_folder, tmp_path_factory):
    """transformers' tokenizer over the same tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(hf_folder / "tokenizer.json"), bos_token="<s>", eos_token="<|end|>"
    )


@pytest.mark.parametrize("template", [CHATML, ASSEMBLED, TOOLS_TEMPLATE, LLAMA3.text])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_ids_equal_transformers(template, length, hf_tokenizer, reference):
    dialect = dialect_for(hf_tokenizer, template, bos_token="<s>", eos_token="<|end|>")
    messages = CONVERSATION[:length]
    expected = reference.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert dialect.render(messages) == expected


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_tools_and_kwargs_reach_the_template(kwargs, hf_tokenizer, reference):
    dialect = dialect_for(hf_tokenizer, TOOLS_TEMPLATE, bos_token="<s>")
    expected = reference.apply_chat_template(
        CONVERSATION, tools=TOOLS, chat_template=TOOLS_TEMPLATE, add_generation_prompt=True, return_dict=False, **kwargs
    )
    ids = dialect.render(CONVERSATION, tools=TOOLS, **kwargs)
    assert ids == expected
    text = hf_tokenizer.decode(ids)
    assert f"Year {datetime.now().year}." in text
    assert '"description": "Wetter für <b>Städte</b>"' in text  # tojson neither escapes HTML nor non-ASCII
    assert ("<think></think>" in text) is (kwargs.get("enable_thinking") is False)


def test_tool_call_arguments_are_an_object_and_content_may_be_null(hf_tokenizer):
    dialect = dialect_for(hf_tokenizer, TOOLS_TEMPLATE)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}
    text = hf_tokenizer.decode(dialect.render([{"role": "assistant", "content": None, "tool_calls": [call]}]))
    assert '<tool_call>{"name": "f", "arguments": {"city": "Köln"}}</tool_call>' in text


@pytest.mark.parametrize("arguments", ["no json", "[1]", "3"])
def test_arguments_that_are_no_object_stay_text(arguments, hf_tokenizer):
    dialect = dialect_for(hf_tokenizer, TOOLS_TEMPLATE)
    call = {"function": {"name": "f", "arguments": arguments}}
    text = hf_tokenizer.decode(dialect.render([{"role": "assistant", "content": "x", "tool_calls": [call]}]))
    assert json.dumps(arguments) in text


def test_null_content_where_the_template_only_concatenates(hf_tokenizer, spell):
    dialect = dialect_for(hf_tokenizer, CHATML)
    ids = dialect.render([{"role": "assistant", "content": None}])
    assert spell(hf_tokenizer, ids) == "«<|im_start|>»assistant\n«<|im_end|>»\n«<|im_start|>»assistant\n"


def test_tools_for_a_template_without_tools_are_refused(hf_tokenizer):
    dialect = dialect_for(hf_tokenizer, CHATML)
    with pytest.raises(RequestError, match="does not take tools") as raised:
        dialect.render(CONVERSATION, tools=TOOLS)
    assert raised.value.param == "tools"
    assert dialect.render(CONVERSATION, tools=[]) == dialect.render(CONVERSATION)


@pytest.mark.parametrize("writes_bos", [True, False])
def test_one_bos(writes_bos, byte_tokenizer):
    tokenizer = byte_tokenizer(["<s>", "<|im_start|>", "<|im_end|>"], bos="<s>")
    dialect = dialect_for(tokenizer, "{{ bos_token }}" * writes_bos + CHATML, bos_token="<s>")
    ids = dialect.render([{"role": "user", "content": "<s>"}])
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1


def test_no_bos_where_the_tokenizer_wants_none(hf_tokenizer):
    assert not hf_tokenizer.add_bos
    assert dialect_for(hf_tokenizer, CHATML).render(CONVERSATION)[0] == hf_tokenizer.special_tokens["<|im_start|>"]


def meta_llama2(sp, turns, system=None):
    """Meta's own way, llama/generation.py: every exchange is BOS + encode(prompt and answer) + EOS."""
    ids = []
    for i, (user, answer) in enumerate(turns):
        if i == 0 and system is not None:
            user = f"<<SYS>>\n{system}\n<</SYS>>\n\n{user}"
        text = f"[INST] {user.strip()} [/INST]"
        ids += [sp.bos_id(), *sp.encode(text if answer is None else f"{text} {answer.strip()} ")]
        ids += [] if answer is None else [sp.eos_id()]
    return ids


@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
def test_llama2_equals_meta(system, sp_folder, sp_tokenizer):
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_file=str(sp_folder / "tokenizer.model"))
    turns = [("Hello  world", "Once upon a time"), ("naïve 漢字?", " a dog "), ("a story", None)]
    messages = [] if system is None else [{"role": "system", "content": system}]
    for user, answer in turns:
        messages.append({"role": "user", "content": user})
        messages += [] if answer is None else [{"role": "assistant", "content": answer}]
    dialect = TemplateDialect(sp_tokenizer, LLAMA2, names={"bos_token": "<s>", "eos_token": "</s>"})
    assert dialect.render(messages) == meta_llama2(sp, turns, system)


@pytest.mark.slow
def test_llama2_equals_transformers(sp_folder, sp_tokenizer, tmp_path):
    pytest.importorskip("google.protobuf")  # which transformers needs to read a .model
    from transformers import AutoTokenizer

    shutil.copy(sp_folder / "tokenizer.model", tmp_path)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"legacy": True}))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(CONVERSATION, chat_template=LLAMA2.text, return_dict=False)
    dialect = TemplateDialect(sp_tokenizer, LLAMA2, names={"bos_token": "<s>", "eos_token": "</s>"})
    assert dialect.render(CONVERSATION) == expected


def test_llama3_format(tiktoken_tokenizer, spell):
    dialect = TemplateDialect(tiktoken_tokenizer, LLAMA3, names={"bos_token": "<|begin_of_text|>"})
    ids = dialect.render([{"role": "system", "content": "Be kind."}, {"role": "user", "content": " hello dog\n"}])
    assert spell(tiktoken_tokenizer, ids) == (
        "«<|begin_of_text|>»«<|start_header_id|>»system«<|end_header_id|>»\n\nBe kind.«<|eot_id|>»"
        "«<|start_header_id|>»user«<|end_header_id|>»\n\nhello dog«<|eot_id|>»"
        "«<|start_header_id|>»assistant«<|end_header_id|>»\n\n"
    )


def test_raise_exception_is_the_request_error(hf_tokenizer):
    dialect = dialect_for(hf_tokenizer, TOOLS_TEMPLATE)
    with pytest.raises(RequestError) as raised:
        dialect.render([{"role": "pirate", "content": "arr"}])
    assert raised.value.message == "No role pirate here, please"
    assert (raised.value.status, raised.value.param) == (400, "messages")


def test_llama2_refuses_roles_that_do_not_alternate(sp_tokenizer):
    dialect = TemplateDialect(sp_tokenizer, LLAMA2, names={"bos_token": "<s>", "eos_token": "</s>"})
    for roles in (["user", "user"], ["assistant"], ["system"], []):
        with pytest.raises(RequestError, match=r"alternate|needs a user message"):
            dialect.render([{"role": role, "content": "x"} for role in roles])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].nothing.at_all }}",
        "{{ messages[99].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson(indent='x', foo=1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_is_a_request_error(template, hf_tokenizer):
    with pytest.raises(RequestError, match="chat template can't write these messages"):
        dialect_for(hf_tokenizer, template).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in 'x' * 2000 %}{% for b in 'x' * 2000 %}{% endfor %}{% endfor %}",
        "{% for i in range(1000) %}{{ 'x' * 1000000 }}{% endfor %}",
        "{{ 'x' * 100000000000 }}",
        "{{ [0] * 100000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_runaway_templates_end(template, hf_tokenizer):
    with pytest.raises(RequestError, match=r"does not end|Range too big"):
        dialect_for(hf_tokenizer, template).render([{"role": "user", "content": "x"}])


def test_every_loop_construct_still_works(hf_tokenizer):
    template = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}"
        "{% else %}none{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for x in missing %}x{% else %}-{% endfor %}"
        "{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    )
    ids = dialect_for(hf_tokenizer, template).render([{"role": "user", "content": "x"}] * 3)
    assert hf_tokenizer.decode(ids) == "1/3,2/3,3/3.a1-12"


@pytest.mark.parametrize("template", ["a\nb\n{% if %}", "a\nb\n{{ x | nofilter }}", "a\nb\n{{ 'open }}"])
def test_syntax_errors_name_file_and_line(template, hf_tokenizer):
    with pytest.raises(CheckpointError, match=r"^t\.jinja: line 3 of the chat template: "):
        dialect_for(hf_tokenizer, template)


def test_an_empty_prompt_is_refused(hf_tokenizer):
    with pytest.raises(RequestError, match="empty prompt"):
        dialect_for(hf_tokenizer, "{{ messages[0].content }}").render([{"role": "user", "content": ""}])


def test_white_space_that_a_control_token_swallows(tmp_path, checkpoint_at):
    """HF's rstrip: Phi-3's `<|end|>` takes the newline after it along."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from models.tokenizers import load_tokenizer

    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|user|>", rstrip=True), AddedToken("<|end|>", rstrip=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + '\n' + m.content + '<|end|>' + '\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": " b <|end"}]
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    expected = reference.apply_chat_template(messages, chat_template=template, return_dict=False)
    assert dialect_for(load_tokenizer(checkpoint_at(tmp_path)), template).render(messages) == expected


def test_rendering_is_quick(hf_tokenizer):
    """The template is compiled once, at load: a render must not compile it."""
    from time import perf_counter

    def seconds(work):
        start = perf_counter()
        work()
        return perf_counter() - start

    dialect = dialect_for(hf_tokenizer, TOOLS_TEMPLATE * 10)
    compiling = min(seconds(lambda: dialect_for(hf_tokenizer, TOOLS_TEMPLATE * 10)) for _ in range(3))
    rendering = min(seconds(lambda: dialect.render(CONVERSATION[1:2])) for _ in range(3))
    assert rendering < compiling / 2
