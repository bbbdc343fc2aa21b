"""Templates get content and arguments in a form that they read, found by rendering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.text.chat_messages import prepare_messages
from engine.text.jinja_sandbox import compile_template
from engine.text.template_formats import call_format, content_forms

#: Each loop over calls is that of a model family's template, around it the least that a chat needs.
CALLS = {
    "deepseek": "{{ f['name'] + '\n```json\n' + f['arguments'] + '\n```' }}",
    "functionary": "<function={{ f.name }}>{{ f.arguments }}</function>",
    "hermes": '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
    "qwen3": "{% if f.arguments is string %}{{ f.arguments }}{% else %}"
    "{{ f.arguments | tojson }}{% endif %}",
    "qwen3_coder": "<function={{ f.name }}>{% if f.arguments is defined %}"
    "{% for k, v in f.arguments|items %}<parameter={{ k }}>"
    "{{ v if v is string else v | tojson }}</parameter>{% endfor %}{% endif %}",
    "qwen3_5": "{% if f.arguments is mapping %}{% for k in f.arguments %}"
    "{% set v = f.arguments[k] %}"
    "<parameter={{ k }}>{{ v if v is string else v | tojson }}</parameter>{% endfor %}{% endif %}",
    "text_as_fallback": "{% if f.arguments is string %}{{ f.arguments }}{% else %}"
    "{% for k, v in f.arguments|items %}<{{ k }}>{{ v }}{% endfor %}{% endif %}",
    "glm": "{% set _args = f.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}",
    "llama_pythonic": "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% endfor %})]",
    "mistral": "{% if tool_call.id|length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}",
    "whole_function": "{{ f | tojson }}",
    "alias": "{% set args = f.arguments %}{% set shown = args if args is string else args|tojson %}"
    "{{ shown }}",
    "before_content": "{{ f.name + f.arguments + message.content }}",
}
TAKES_TEXT = {"deepseek", "functionary", "qwen3", "alias", "before_content"}
#: Qwen 3.5 and later test the content's type, which says nothing about arguments.
CONTENT_MACRO = """{% macro render(content) %}{% if content is string %}{{ content }}
{%- elif content is iterable and content is not mapping %}
{%- for item in content %}{% if item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}
{%- elif content is none or content is undefined %}{% else %}{{ raise_exception('content') }}
{%- endif %}{% endmacro %}"""
ARGUMENTS = {"city": "Ōsaka", "days": [1, 2]}
ARGUMENTS_TEXT = '{"city":"Ōsaka", "days": [1,2]}'


def call_template(name: str) -> str:
    return (
        CONTENT_MACRO
        + "{% for message in messages %}[{{ message.role }}]{% if message.tool_calls %}"
        + "{% for tool_call in message.tool_calls %}{% set f = tool_call.function %}"
        + CALLS[name]
        + "{% endfor %}{% else %}{{ render(message.content) }}{% endif %}{% endfor %}"
    )


def chat_with(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call], **fields},
        {"role": "tool", "content": "22", "tool_call_id": "call00000"},
    ]


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    prepared = prepare_messages(messages, template)
    return compile_template(template).render({"messages": prepared})


def by_transformers(template: str, messages: list[dict[str, Any]]) -> str:
    return render_jinja_template(conversations=[messages], chat_template=template)[0][0]


@pytest.mark.parametrize("name", CALLS)
def test_fault_81_arguments_reach_a_template_in_the_form_that_it_writes(name: str) -> None:
    template = call_template(name)
    assert call_format(template).arguments_as_text is (name in TAKES_TEXT)
    form = ARGUMENTS_TEXT if name in TAKES_TEXT else ARGUMENTS
    fields = {"content": ""} if name == "before_content" else {}
    expected = by_transformers(template, chat_with(form, **fields))
    assert rendered(template, chat_with(ARGUMENTS_TEXT)) == expected
    assert "Ōsaka" in expected
    assert "\\" not in expected


@pytest.mark.parametrize("name", CALLS)
def test_fault_81_arguments_that_come_as_an_object_are_taken_too(name: str) -> None:
    template = call_template(name)
    as_text = rendered(template, chat_with(json.dumps(ARGUMENTS, ensure_ascii=False)))
    assert rendered(template, chat_with(ARGUMENTS)) == as_text


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("arguments", "visible_text"),
    [
        ("", ""), (" ", ""), (None, ""), ("null", ""), ("{}", ""),
        ('{"city": "Osa', "Osa"),
        ("[1, 22]", "22"),
        ("not JSON", "not JSON"),
        ('"text"', "text"),
        ('{"a": ' * 5000, "a"),
    ],
)  # fmt: skip
def test_fault_82_a_chat_goes_on_after_arguments_that_are_no_object(
    name: str, arguments: Any, visible_text: str
) -> None:
    text = rendered(call_template(name), chat_with(arguments))
    assert visible_text in text
    assert text.startswith("[user]x")
    assert text.endswith("[tool]22")
    if not visible_text:
        assert text == rendered(call_template(name), chat_with({}))


@pytest.mark.parametrize("content", ["absent", None, ""])
def test_fault_82_a_chat_goes_on_for_a_template_that_reads_no_calls(content: str | None) -> None:
    template = (Path(__file__).parents[3] / "examples" / "template_chatml.jinja").read_text()
    user, call, result = chat_with("{}")
    call = {name: value for name, value in call.items() if name != "content"}
    if content != "absent":
        call["content"] = content
    text = rendered(template, [user, call, result])
    assert "<|im_start|>assistant\n<|im_end|>" in text
    result["content"] = None
    assert "<|im_start|>tool\n<|im_end|>" in rendered(template, [user, call, result])


@pytest.mark.parametrize("calls", [[], None])
def test_fault_82_an_empty_list_of_calls_is_none(calls: Any) -> None:
    """Some templates ask whether there is a list, and leave the content out where there is."""
    template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}calls"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    message = {"role": "assistant", "content": "So.", "tool_calls": calls}
    assert rendered(template, [message]) == "So."


#: How templates reach the content of a message: what each reads of a string, of parts, of one part.
CONTENTS = {
    "string": ("{{ message.content }}", {"string"}),
    "concatenated": ("{{ message['content'] + '' }}", {"string"}),
    "trimmed": ("{{ message.content | trim }}", {"string"}),
    "macro": (CONTENT_MACRO + "{{ render(message.content) }}", {"string", "parts", "one_part"}),
    "macro_of_parts": (
        "{% macro parts(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
        "{{ parts(message.content) }}",
        {"parts", "one_part"},
    ),
    "variable": (
        "{% set body = message['content'] %}{% for p in body %}{{ p['text'] }}{% endfor %}",
        {"parts", "one_part"},
    ),
    "map": (
        "{{ message.content | map(attribute='text') | join('') }}",
        {"parts", "one_part"},
    ),
    "selected": (
        "{{ (message.content | selectattr('type', 'equalto', 'text') | list) "
        "| map(attribute='text') | join('') }}",
        {"parts", "one_part"},
    ),
    "first": ("{{ message.content[0]['text'] }}", {"one_part"}),
    "first_or_string": (
        "{{ message.content if message.content is string else message.content[0].text }}",
        {"string", "one_part"},
    ),
    "json_of_lists": (
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{{ message.content | tojson }}{% endif %}",
        {"string"},
    ),
    "type_test_of_something_else": (
        "{% if message.role is string %}{% for p in message.content %}{{ p.text }}{% endfor %}"
        "{% endif %}",
        {"parts", "one_part"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_fault_96_a_template_gets_content_as_it_reads_it(name: str, role: str) -> None:
    reader, forms = CONTENTS[name]
    template = f"{{% for message in messages %}}[{{{{ message.role }}}}]{reader}{{% endfor %}}"
    assert content_forms(template, role) == forms
    two = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": role, "content": two}
    if "parts" in forms:
        assert rendered(template, [message]) == by_transformers(template, [message])
    else:
        assert rendered(template, [message]) == f"[{role}]one\ntwo"
    text = {"role": role, "content": "only"}
    assert rendered(template, [text]) == f"[{role}]only"
    if "string" in forms:
        assert rendered(template, [text]) == by_transformers(template, [text])


def test_fault_96_each_role_has_a_form_of_its_own() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content + '|' }}{% endif %}"
        "{% for message in messages if message.role == 'user' %}"
        "{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    chat = [{"role": "system", "content": parts}, {"role": "user", "content": "hello"}]
    assert rendered(template, chat) == "be\nbrief|hello"


def test_a_template_that_never_ends_reads_nothing() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert content_forms(endless, "user") == frozenset()
