"""Chat templates render as `transformers` renders them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.contract.errors import InvalidRequest
from engine.text.chat_template import render_chat, render_chat_text
from engine.text.jinja_sandbox import RenderLimits, TemplateLimit, compile_template
from engine.text.tokenizer import load_tokenizer
from tests.engine.text import folders
from tests.engine.text.conftest import CHAT_KINDS

SINGLE = [{"role": "user", "content": "Hello, world!"}]
TURNS = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "  1 < 2 and a[0] <b>bold</b> 東京 👩‍👩‍👧?  "},
    {"role": "assistant", "content": "Yes.\n", "tool_calls": None},
    {"role": "user", "content": "Why\n\n?"},
]
THINKING = [
    {"role": "user", "content": "What is <|this?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThis."},
    {"role": "user", "content": "And that?"},
    {"role": "assistant", "content": "<think>\noh\n</think>\n\nThat."},
]
CALL = {"name": "look_up", "arguments": {"city": "Ōsaka <b>", "days": [1, 2]}}
TOOL_CHAT = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "22 °C"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "a < b & 'c'", "parameters": {"x": 1}},
    }
]


def expected(folder, messages, **options) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    return tokenizer.apply_chat_template(messages, return_dict=False, **options)


@pytest.mark.parametrize("name", [name for name in CHAT_KINDS if name != "parts"])
@pytest.mark.parametrize("messages", [SINGLE, TURNS, TURNS[:3], THINKING], ids=range(4))
@pytest.mark.parametrize("prompt", [True, False])
def test_tokens_equal_transformers(chat_folder_of, chat_tokenizer_of, name, messages, prompt):
    options = {"add_generation_prompt": prompt}
    got = render_chat(chat_tokenizer_of(name), messages, **options)
    assert got == expected(chat_folder_of(name), messages, **options)


@pytest.mark.parametrize("name", ["qwen", "llama3"])
@pytest.mark.parametrize("messages", [SINGLE, TOOL_CHAT], ids=["plain", "calls"])
def test_tools_equal_transformers(chat_folder_of, chat_tokenizer_of, name, messages):
    got = render_chat(chat_tokenizer_of(name), messages, tools=TOOLS)
    want = expected(chat_folder_of(name), messages, tools=TOOLS, add_generation_prompt=True)
    assert got == want


def test_template_variables_equal_transformers(chat_folder_of, chat_tokenizer_of):
    options = {"enable_thinking": False, "add_generation_prompt": True}
    got = render_chat(chat_tokenizer_of("qwen"), SINGLE, **options)
    assert got == expected(chat_folder_of("qwen"), SINGLE, **options)
    assert got != render_chat(chat_tokenizer_of("qwen"), SINGLE)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "qwen"])
@pytest.mark.parametrize("final", ["The answer", "The answer is:  "])
def test_continuing_the_final_message_equals_transformers(
    chat_folder_of, chat_tokenizer_of, name, final
):
    messages = [*SINGLE, {"role": "assistant", "content": final}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    got = render_chat(chat_tokenizer_of(name), messages, **options)
    assert got == expected(chat_folder_of(name), messages, **options)
    assert "The answer" in chat_tokenizer_of(name).decode(got)[-20:]


def test_a_final_message_of_parts_can_be_continued(chat_folder_of, chat_tokenizer_of):
    parts = [{"type": "text", "text": "Once"}, {"type": "text", "text": "upon"}]
    messages = [*SINGLE[:0], {"role": "assistant", "content": parts}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    got = render_chat(chat_tokenizer_of("parts"), messages, **options)
    assert got == expected(chat_folder_of("parts"), messages, **options)


def test_reasoning_goes_by_any_of_its_names(chat_folder_of, chat_tokenizer_of):
    for field in ("reasoning_content", "reasoning", "thinking"):
        messages = [*SINGLE, {"role": "assistant", "content": "Hi", field: "greet back"}]
        options = {"add_generation_prompt": False}
        got = render_chat(chat_tokenizer_of("qwen"), messages, **options)
        assert got == expected(chat_folder_of("qwen"), messages, **options)
        assert "greet back" in chat_tokenizer_of("qwen").decode(got)


def test_text_parts_are_joined_for_templates_that_read_strings(chat_tokenizer_of):
    parts = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": "three"}]
    joined = [{"role": "user", "content": "one\ntwo\nthree"}]
    tokenizer = chat_tokenizer_of("chatml")
    assert render_chat(tokenizer, [{"role": "user", "content": parts}]) == render_chat(
        tokenizer, joined
    )


def test_strings_become_parts_for_templates_that_read_parts(chat_folder_of, chat_tokenizer_of):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello, world!"}]}]
    got = render_chat(chat_tokenizer_of("parts"), SINGLE)
    assert got == expected(chat_folder_of("parts"), parts, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (7, "string or a list"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "text only"),
        ([7], "text only"),
        ([{"type": "text"}], "text must be a string"),
        ([{"type": "text", "text": 7}], "text must be a string"),
        ({"a": object()}, "no JSON"),
    ],
)
def test_bad_content_is_refused(chat_tokenizer_of, content, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        render_chat(chat_tokenizer_of("chatml"), [{"role": "user", "content": content}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("bad", [[], None, "hi", ["hi"], [{}], [{"role": 1, "content": "x"}]])
def test_fault_02_empty_or_shapeless_messages_are_refused(chat_tokenizer_of, bad):
    with pytest.raises(InvalidRequest) as caught:
        render_chat(chat_tokenizer_of("chatml"), bad)
    assert caught.value.param == "messages"


def test_a_template_that_refuses_answers_in_its_own_words(chat_tokenizer_of):
    messages = [{"role": "assistant", "content": "me first"}]
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render_chat(chat_tokenizer_of("mistral"), messages)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ [] | first | tojson }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10**9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_that_fails_or_runs_wild_is_the_requests_error(chat_tokenizer_of, source):
    with pytest.raises(InvalidRequest):
        render_chat(chat_tokenizer_of("chatml"), SINGLE, chat_template=source)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% endif %}", "{{ x | nofilter }}"])
def test_a_template_that_is_no_jinja_names_the_field(chat_tokenizer_of, source):
    with pytest.raises(InvalidRequest) as caught:
        render_chat(chat_tokenizer_of("chatml"), SINGLE, chat_template=source)
    assert caught.value.param == "chat_template"


def test_what_a_template_writes_is_bounded(chat_tokenizer_of):
    source = "{% for i in range(1000) %}0123456789{% endfor %}"
    text = render_chat_text(chat_tokenizer_of("chatml"), SINGLE, chat_template=source)
    assert len(text) == 10_000
    with pytest.raises(InvalidRequest, match="more than 9999"):
        render_chat_text(
            chat_tokenizer_of("chatml"),
            SINGLE,
            chat_template=source,
            limits=RenderLimits(chars=9999),
        )


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(30) }}",
        "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    ],
)
def test_loops_have_a_limit_of_steps(chat_tokenizer_of, source):
    with pytest.raises(InvalidRequest) as caught:
        render_chat(
            chat_tokenizer_of("chatml"),
            SINGLE,
            chat_template=source,
            limits=RenderLimits(steps=20_000),
        )
    assert caught.value.code in ("render_timeout", "invalid_value")


def test_loops_have_a_limit_of_time(chat_tokenizer_of):
    source = "{% for i in range(99999) %}{% endfor %}"
    with pytest.raises(TemplateLimit, match="too long"):
        render_chat(
            chat_tokenizer_of("chatml"),
            SINGLE,
            chat_template=source,
            limits=RenderLimits(seconds=0.0),
        )
    short = "{% for i in range(9) %}x{% endfor %}"
    assert render_chat_text(chat_tokenizer_of("chatml"), SINGLE, chat_template=short) == "x" * 9


@pytest.mark.parametrize(
    "expression",
    [
        "'%9999999999d' % 1",
        "'{:9999999999}'.format(1)",
        "'%9999999999d' | format(1)",
        "'x'.ljust(9999999999)",
        "'x' | center(9999999999)",
        "'x' | indent(9999999999, true)",
        "('x' * 9999999).replace('x', 'x' * 9999999)",
        "('x' * 9999999).join(['x'] * 9999999)",
        "('x' * 9999999) ~ ('x' * 9999999)",
        "('x' * 9999999) + ('x' * 9999999)",
        "([1] * 9999999) + ([1] * 9999999)",
    ],
)
def test_templates_make_no_gigabytes(chat_tokenizer_of, expression):
    source = f"{{% set x = {expression} %}}"
    with pytest.raises(InvalidRequest, match="too large"):
        render_chat(chat_tokenizer_of("chatml"), SINGLE, chat_template=source)


def test_weighed_operators_do_what_they_did(chat_tokenizer_of):
    source = (
        "{{ 'a' ~ 1 ~ none }} {{ 'a' + 'b' }} {{ 1 + 2 }} {{ '%05.1f' % 3.14 }} {{ 'x'.rjust(3) }} "
        "{{ '{:>4}'.format(7) }} {{ 'a-b'.replace('-', '+') }} {{ ','.join(['a', 'b']) }} "
        "{{ 'x' | center(3) }}|{{ 'a\nb' | indent(1) }}"
    )
    text = render_chat_text(chat_tokenizer_of("chatml"), SINGLE, chat_template=source)
    assert text == "a1None ab 3 003.1   x    7 a+b a,b  x |a\n b"


def test_a_huge_template_is_refused(chat_tokenizer_of):
    with pytest.raises(InvalidRequest) as caught:
        render_chat(chat_tokenizer_of("chatml"), SINGLE, chat_template="x" * 600_000)
    assert caught.value.param == "chat_template"


def test_helpers_of_templates(chat_tokenizer_of):
    source = (
        "{% generation %}{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}"
        "{% endfor %}{% endgeneration %} {{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }} "
        "{{ dict(a=1).a }} {{ strftime_now('%Y') | length }}"
    )
    text = render_chat_text(chat_tokenizer_of("chatml"), SINGLE, chat_template=source)
    assert text == '13 {"a": 1, "b": "<é>"} 1 4'


def test_compiled_templates_are_kept_and_bounded():
    compile_template.cache_clear()
    assert compile_template("{{ 1 }}") is compile_template("{{ 1 }}")
    for k in range(500):
        compile_template(f"{{{{ {k} }}}}")
    assert compile_template.cache_info().currsize == 64


def test_without_a_template_chat_is_refused(tokenizer_of):
    with pytest.raises(InvalidRequest, match="no chat template"):
        render_chat(tokenizer_of("byte_level"), SINGLE)


def test_named_templates(tmp_path):
    folder = folders.save(tmp_path, folders.byte_level(), folders.CHATML_CONFIG)
    (folder / "chat_template.jinja").write_text("plain", encoding="utf-8")
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("tools", encoding="utf-8")
    (extra / "rag.jinja").write_text("{{ documents[0].text }}", encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == "plain"
    assert render_chat_text(tokenizer, SINGLE) == "plain"
    assert render_chat_text(tokenizer, SINGLE, tools=TOOLS) == "tools"
    documents = [{"title": "t", "text": "from a document"}]
    text = render_chat_text(tokenizer, SINGLE, chat_template="rag", documents=documents)
    assert text == "from a document"


def test_continuing_and_prompting_exclude_each_other(chat_tokenizer_of):
    with pytest.raises(InvalidRequest) as caught:
        render_chat(chat_tokenizer_of("chatml"), SINGLE, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "assistant"}], True),
        ([{"role": "assistant", "content": [{"type": "text", "text": "x"}]}], "reasoning_content"),
        ([{"role": "assistant", "content": "x", "other": 3}], "other"),
    ],
)
def test_what_cant_be_continued_is_refused(chat_tokenizer_of, messages, field):
    with pytest.raises(InvalidRequest) as caught:
        render_chat(
            chat_tokenizer_of("qwen"),
            messages,
            continue_final_message=field,
            add_generation_prompt=False,
        )
    assert caught.value.param == "continue_final_message"


def test_fault_39_deep_tools_are_refused(chat_tokenizer_of):
    deep: dict = {}
    for _ in range(10_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest) as caught:
        render_chat(chat_tokenizer_of("qwen"), SINGLE, tools=[deep])
    assert caught.value.param == "tools"


LLAVA = (Path(__file__).resolve().parents[3] / "examples" / "template_llava.jinja").read_text()
IMAGE = {"type": "image"}


@pytest.mark.parametrize("path", ["tokenizer_config.json", "processor_config.json"])
def test_pictures_stand_before_the_text_for_a_template_that_reads_strings(tmp_path, path):
    config = {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<image>"]}
    folder = folders.save(tmp_path, folders.byte_level(), config)
    settings = config if path == "tokenizer_config.json" else {}
    (folder / path).write_text(json.dumps({**settings, "image_token": "<image>"}))
    tokenizer = load_tokenizer(folder)
    image_id = tokenizer.encode("<image>")[0]
    question = {"type": "text", "text": "What?"}
    for content, count, text in (
        ([question, IMAGE], 1, "<image>\nWhat?"),
        ([IMAGE, question, IMAGE], 2, "<image>\n<image>\nWhat?"),
        ([IMAGE], 1, "<image>"),
    ):
        messages = [{"role": "user", "content": content}]
        ids = render_chat(tokenizer, messages, chat_template=LLAVA)
        assert ids == tokenizer.encode(f"USER: {text}\nASSISTANT:")
        assert ids.count(image_id) == count
    # What a client writes stays text, be it the token or the character that stands for it.
    for forged in ("<image>", "\U00100000", "\U00100001", "a <image"):
        content = [{"type": "text", "text": forged}, IMAGE]
        messages = [{"role": "user", "content": content}]
        ids = render_chat(tokenizer, messages, chat_template=LLAVA)
        assert ids.count(image_id) == 1
        assert tokenizer.decode(ids, skip_special_tokens=False) == (
            f"USER: <image>\n{forged}\nASSISTANT:"
        )


def test_pictures_are_refused_where_the_model_has_no_token_for_them(chat_tokenizer_of):
    with pytest.raises(InvalidRequest, match=r"content\[0\] has type 'image', but .* text only"):
        render_chat(
            chat_tokenizer_of("chatml"), [{"role": "user", "content": [IMAGE]}], chat_template=LLAVA
        )
