"""Chat templates render exactly as in transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from control_plane.text.template import ChatTemplate
from tandem_runtime.errors import InternalError, InvalidRequest
from tests.control_plane.api.model import byte_level_tokenizer

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- if tools is not none %}
    {{- "<|start_header_id|>system<|end_header_id|>\n\nToday is " + strftime_now("%d %b %Y") + ". You may call:\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + "\n\n" }}
    {%- endfor %}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'system'] %}{%- continue %}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = """{%- set ns = namespace(system="") %}
{%- if messages[0]["role"] == "system" %}
    {%- set ns.system = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate user/assistant") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and tools %}{{ "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}{% endif %}
        {{- "[INST] " + (ns.system + "\n\n" if loop.last and ns.system else "") + message["content"] + "[/INST]" }}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}
{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{% for message in rest %}
    {% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
<start_of_turn>{{ role }}
{{ (first if loop.first else '') + (message['content'] | trim) }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
GENERATION = """{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}
  {% generation %}{{ m.content }}{{ loop.index }}{% endgeneration %}
{% else %}{{ m.content }}{% endif %}{% if loop.index == 9 %}{% break %}{% endif %}
{% endfor %}{{ undefined_name }}{{ pad_token }}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>&</b> 'there' \"you\" 你好 😀"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  two  \n"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": ""},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "in <°C> é", "parameters": {"type": "object", "properties": {}}},
    }
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "four turns"])
@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL, GEMMA, GENERATION])
def test_a_template_renders_as_transformers_renders_it(
    source: str, chat: list[dict[str, Any]], add_generation_prompt: bool, tools: list[dict[str, Any]] | None
) -> None:
    theirs: Any = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), **SPECIAL)
    expected = theirs.apply_chat_template(
        chat, tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    template = ChatTemplate(source, SPECIAL)
    assert template.render(chat, tools=tools, add_generation_prompt=add_generation_prompt) == expected


def test_a_template_that_refuses_messages_speaks_for_itself() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate(MISTRAL, SPECIAL).render([{"role": "assistant", "content": "first"}])


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(InternalError, match="not valid jinja"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([])
