"""gpt-oss's messages held to a form: calls of custom tools, strict functions, an answer instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from engine.text.tokenizer import Tokenizer, load_tokenizer
from inference.chat.parsers import OutputParserConfig, grammar_token_ids
from inference.chat.turn import build_message
from inference.parsers.custom_tools import parameters
from inference.parsers.harmony import NEXT, HarmonyParser, HarmonyToolParser
from inference.parsers.tool_grammar import ToolFunction
from tests.inference.parsers import read
from tests.inference.test_tool_grammar import DEMO_MODEL, follow
from tests.inference.tokenizer_folder import with_added_tokens

TOOL = ToolFunction("run", parameters(), strict=True, grammar='start: "say \\"" /[a-c\\n]/ "\\""')
ANSWER = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The demo's, with gpt-oss's control tokens."""
    folder = tmp_path_factory.mktemp("harmony")
    return load_tokenizer(Path(with_added_tokens(DEMO_MODEL, folder, HarmonyParser.markers)))


@pytest.mark.parametrize("kind", [{}, {"required": False}, {"answer": ANSWER}])
@pytest.mark.parametrize("parallel", [False, True])
def test_messages_keep_to_their_grammar(
    harmony: Tokenizer, kind: dict[str, Any], parallel: bool
) -> None:
    special = grammar_token_ids(harmony)
    grammar = HarmonyToolParser.layout.grammar([TOOL], special, parallel=parallel, **kind)
    backend = LLTokenizer(harmony.to_json(), eos_token=[harmony.eos_token_id or 0])
    plan = OutputParserConfig(
        reasoning=HarmonyParser,
        tools=lambda: HarmonyToolParser([TOOL]),
        parallel=parallel,
        custom=frozenset({"run"}),
    )
    called = 0
    for seed in range(8):
        text = follow(backend, harmony, grammar, seed, limit=150)
        if text is None:
            continue  # it talks on
        message = build_message(read(plan, [f"<|channel|>analysis<|message|>Hm.{NEXT}{text}"]))
        assert message["reasoning"].startswith("Hm.")
        calls = message.get("tool_calls") or []
        called += len(calls)
        for call in calls:
            assert call["custom"]["input"] in [f'say "{char}"' for char in "abc\n"]
        if not calls:
            assert kind
            assert "<|" not in (message["content"] or "")
            assert "answer" not in kind or json.loads(message["content"]) == {}
    assert called or kind
