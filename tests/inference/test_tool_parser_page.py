"""The tool parser of docs/extending.md, followed to the letter."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from engine.text.tokenizer import load_tokenizer
from inference.apps import check_gateway
from inference.chat.parsers import OutputParserConfig, grammar_token_ids
from inference.chat.turn import build_message
from inference.parsers.registry import tool_parsers
from inference.parsers.tool_grammar import ToolFunction
from tests.engine.pages import section
from tests.inference.parsers import read, shape

CODE, SETTING = re.findall(r"```python\n(.*?)```", section("A tool parser"), re.DOTALL)
ROOT = Path(__file__).resolve().parents[2]
TEXT = 'So: <<weather {"city": "a >> b"}>><<clock {}>> <<no>>'


@pytest.fixture
def page(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "shouting.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace: dict[str, Any] = {}
    exec(SETTING, namespace)
    settings.QUIRE = namespace["QUIRE"]
    yield
    sys.modules.pop("shouting", None)


@pytest.mark.usefixtures("page")
def test_the_parser_is_found_by_its_name_and_by_a_template() -> None:
    assert check_gateway() == []
    parser = tool_parsers.get("shouting")
    assert parser is not None
    assert tool_parsers.for_template("Call with <<NAME {...}>>") is parser


@pytest.mark.usefixtures("page")
def test_it_reads_calls_however_they_are_cut() -> None:
    parser = tool_parsers.get("shouting")
    assert parser is not None
    plan = OutputParserConfig(tools=partial(parser, ()))
    message = build_message(read(plan, [TEXT]))
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]
    assert calls == [("weather", '{"city": "a >> b"}'), ("clock", "{}")]
    assert message["content"] == "So:<<no>>"
    for cut in range(len(TEXT)):
        assert shape(read(plan, [TEXT[:cut], TEXT[cut:]])) == shape(read(plan, [TEXT]))
        cut_short = TEXT[:cut]
        assert shape(read(plan, list(cut_short))) == shape(read(plan, [cut_short]))


@pytest.mark.usefixtures("page")
def test_its_calls_can_be_enforced() -> None:
    parser, demo = tool_parsers.get("shouting"), load_tokenizer(ROOT / "demo/model")
    assert parser is not None
    function = ToolFunction(
        "weather", {"type": "object", "properties": {"city": {"type": "string"}}}
    )
    grammar = parser.layout.grammar([function], grammar_token_ids(demo), parallel=False)
    backend = LLTokenizer(demo.to_json(), eos_token=[demo.eos_token_id or 0])
    matcher = LLMatcher(backend, grammar_from("grammar", grammar))
    call = f"<<weather {json.dumps({'city': 'Rome'})}>>"
    assert matcher.consume_tokens(demo.encode(call, add_special_tokens=False))
    assert matcher.is_accepting()
