"""Patterns of layers' names mean what `re` says, and none takes for ever."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from engine.contract import safe_pattern
from engine.contract.errors import ModelLoadError
from engine.contract.safe_pattern import SafePattern
from engine.quantization.formats.registry import find_format
from tests.engine.checkpoints.packages import scheme

_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\.", r"\d", "c", "^", "$", r"\{", "[]a]", "[a-b.]"]
_COUNTS = ["*", "+", "?", "*?", "{2}", "{1,}", "{,2}", "{1,3}", "+?"]


def drawn(draw: random.Random, depth: int) -> str:
    """A pattern of groups in groups, so deep."""
    kind = draw.random()
    if depth == 0 or kind < 0.35:
        return draw.choice(_ATOMS)
    inner = drawn(draw, depth - 1)
    if kind < 0.55:
        return inner + drawn(draw, depth - 1)
    if kind < 0.7:
        return f"{draw.choice(['(', '(?:'])}{inner}|{drawn(draw, depth - 1)})"
    if kind < 0.78:
        return f"{draw.choice(['(?=', '(?!'])}{inner})"
    repeated = f"(?:{inner})" if draw.random() < 0.6 else draw.choice(["a", ".", "[ab]"])
    return repeated + draw.choice(_COUNTS)


def test_a_pattern_matches_what_re_matches() -> None:
    draw, matched, missed = random.Random(11), 0, 0
    while matched + missed < 8000:
        text = drawn(draw, draw.randint(1, 5))
        try:
            oracle = re.compile(text)
        except re.error:
            continue
        pattern = SafePattern(text)
        for _ in range(8):
            name = "".join(draw.choices("ab.c1\n", (6, 6, 3, 2, 2, 1), k=draw.randint(0, 8)))
            expected = oracle.match(name) is not None
            assert pattern.matches(name) is expected, (text, name)
            matched, missed = matched + expected, missed + (not expected)
    assert min(matched, missed) > 1000


@pytest.mark.parametrize(
    ("text", "name", "missing"),
    [
        (r".*self_attn\.(q|k|v)_proj$", "model.layers.3.self_attn.k_proj", "model.layers.3.mlp.up"),
        (r"^model\.layers\.(?:[0-9]|1[01])\.mlp", "model.layers.11.mlp.up", "model.layers.12.mlp"),
        (r"(?!.*(?:lm_head|router)).*", "model.layers.0.mlp", "model.layers.0.router"),
        (r"model.*\.\d{1,2}\.w\w+", "model.layers.10.weight", "model.layers.100.weight"),
        (r"model\.(?P<part>up|down)\.(?P=part)\b", "model.up.up", "model.up.down"),
        (r"(?i)model\.LAYERS", "model.layers", "model.layer"),
        (r"(?:.*\.)?experts\.[^.]+\.down_proj", "a.experts.7.down_proj", "a.experts.7.b.down_proj"),
    ],
)
def test_patterns_as_they_are_found(text: str, name: str, missing: str) -> None:
    assert SafePattern(text).matches(name)
    assert not SafePattern(text).matches(missing)


EVIL = [
    ("(a+)+$", "a" * 60 + "b"),
    ("(a+b?)+$", "a" * 60 + "c"),
    ("(a|a)*b", "a" * 60),
    ("(?:.|a|[a-z])" * 30 + "!", "a" * 80),
    (".*" * 60 + "x", "a" * 4000),
    ("(.*)*(.*)*(.*)*!", "a" * 400),
    ("((((a*b?)*c?)*)*)*$", "ab" * 200 + "!"),
    ("(?=(a+)+$)a", "a" * 60 + "b"),
]


@pytest.mark.parametrize(("text", "name"), EVIL)
def test_what_takes_re_for_ever_is_matched_at_once(text: str, name: str) -> None:
    """`re` needs more than 10^9 steps for each of these."""
    started = time.process_time()
    assert not SafePattern(text).matches(name)
    assert time.process_time() - started < 2


def test_a_name_that_takes_too_long_ends_the_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_pattern, "MATCH_TIMEOUT_S", 0.05)
    with pytest.raises(ValueError, match="too long to match"):
        SafePattern("(?:a|a)" * 60 + "b").matches("a" * 80)


def test_the_time_of_all_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_pattern, "TOTAL_TIMEOUT_S", 0.01)
    pattern = SafePattern("(?:.*a)*!")
    names = ["a" * 60] * 1_000_000
    with pytest.raises(ValueError, match="too long to match"):
        all(not pattern.matches(name) for name in names)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(", "no pattern"),
        ("a" * 999, "longer"),
        (r"\p{L}", "unescaped '{'"),
        ("q{e<=1}", "unescaped '{'"),
        (r"q\\{e}", "unescaped '{'"),
        ("[[:alpha:]]", r"unescaped '\[:'"),
        ("(?R)", "no pattern"),
        ("a{99999999999999999999}", "repeats its parts"),
        ("((((((a{50}){50}){50}){50}){50}){50})", "repeats its parts"),
    ],
)
def test_what_regex_reads_differently_is_refused_by_its_field(text: str, why: str) -> None:
    config: dict[str, Any] = scheme(**_W4)
    config["config_groups"]["group_0"]["targets"] = [f"re:{text}"]
    with pytest.raises(ModelLoadError, match=why) as caught:
        find_format(config)
    assert caught.value.param == "quantization_config.config_groups.group_0.targets"
