"""JSON bodies are read strictly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.contract.errors import InvalidRequest
from inference.web import json_body as json_bounds
from inference.web.json_body import parse_object


def parse(text: str | bytes, depth: int = 64) -> dict[str, Any]:
    return parse_object(text if isinstance(text, bytes) else text.encode(), depth)


def test_an_object_is_read() -> None:
    assert parse('{"a": [1, 2.5, "x", null, true]}') == {"a": [1, 2.5, "x", None, True]}
    assert parse(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '"x"', "1", '{"a":}', "{'a':1}", '{"a":1}x', '{"a":NaN}', '{"a":-Infinity}'],
)
def test_fault_01_malformed_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(text)
    assert caught.value.code == "invalid_json"


def test_fault_01_a_duplicate_key_is_refused_at_any_depth() -> None:
    for text in ('{"a":1,"a":2}', '{"x":[{"y":{"a":1,"b":2,"a":3}}]}'):
        with pytest.raises(InvalidRequest, match="'a' occurs twice"):
            parse(text)


@pytest.mark.parametrize("depth", [65, 100, 10_000, 200_000])
@pytest.mark.parametrize(("opening", "right"), [("[", "]"), ('{"a":', "}")])
def test_fault_01_deep_json_is_refused(depth: int, opening: str, right: str) -> None:
    inside = opening * depth + "1" + right * depth
    with pytest.raises(InvalidRequest, match=r"64 levels|holds too much"):
        parse('{"x":' + inside + "}")


def test_depth_is_counted_exactly() -> None:
    for depth in (1, 2, 3):
        text = '{"x":' + "[" * depth + "]" * depth + "}"
        assert parse(text, depth + 1)
        with pytest.raises(InvalidRequest):
            parse(text, depth)
    wide = {"x": [[1], [2], {"a": []}] * 1000}
    assert parse(json.dumps(wide), 4) == wide


def test_fault_01_a_number_of_a_million_digits_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        parse('{"n": ' + "9" * 1_000_000 + "}")


def test_fault_16_lone_surrogates_become_replacement_characters() -> None:
    value = parse(r'{"a\ud800": ["x\udfffy", {"b": "\ud83d\ude00"}]}')
    assert value == {"a�": ["x�y", {"b": "😀"}]}
    json.dumps(value, ensure_ascii=False).encode()


def test_invalid_utf8_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        parse(b'{"a": "\xff\xfe"}')


@pytest.mark.parametrize("length", [2, 3, 7, 64])
def test_marks_are_counted_whatever_the_pieces(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"a,": ["\\", '"', '\\"', "{[,:", "\\" * 9, ""], "b": {'"': "x" * 9, "c": [1, 2]}}
    body = json.dumps(value).encode()
    monkeypatch.setattr(json_bounds, "_CHUNK_BYTES", length)
    assert json_bounds.count_tokens_outside_strings(body) == json_bounds.JsonTokenCounts(8, 4, 4)
