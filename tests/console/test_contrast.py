"""Every pair of text and ground that the pages use meets WCAG AA, in both themes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import console

CSS = Path(console.__file__).parent / "static/console/css"
TOKENS = (CSS / "tokens.css").read_text()

GROUNDS = ["paper", "sheet", "desk", "hover"]
INKS = ["ink", "ink-soft", "ink-faint", "rubric", "lapis", "verdigris", "ochre", "madder"]
TEXT = [(ink, ground) for ink in INKS for ground in GROUNDS]
TEXT += [("button-ink", "button"), ("button-ink", "button-hover"), ("ink", "selection")]
TEXT += [(ink, f"{wash}-wash") for wash in ("madder", "ochre") for ink in ("ink", "ink-soft", wash)]
TEXT += [("sheet", "rubric"), ("sheet", "madder"), ("ink", "verdigris-wash"), ("ink", "lapis-wash")]
#: Borders of fields and the like need 3 : 1 against what they lie on.
EDGES = [("rule-strong", ground) for ground in ("paper", "sheet", "desk")]


def blocks() -> dict[str, dict[str, str]]:
    """The custom properties by theme."""
    light = TOKENS.split(":root {", 1)[1].split("}", 1)[0]
    system = TOKENS.split(':root:not([data-theme="light"]) {', 1)[1].split("}", 1)[0]
    chosen = TOKENS.split(':root[data-theme="dark"] {', 1)[1].split("}", 1)[0]
    pattern = re.compile(r"--([a-z-]+):\s*([^;]+);")
    return {
        name: dict(pattern.findall(block))
        for name, block in (("light", light), ("system", system), ("dark", chosen))
    }


def colour(theme: dict[str, str], name: str) -> str:
    value = theme[name]
    while value.startswith("var(--"):
        value = theme[value[6:-1]]
    return value


def luminance(hex_colour: str) -> float:
    channels = [int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ratio(theme: dict[str, str], first: str, second: str) -> float:
    one, two = sorted((luminance(colour(theme, name)) for name in (first, second)), reverse=True)
    return (one + 0.05) / (two + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_a_contrast_of_at_least_4_5(theme: str) -> None:
    palette = blocks()[theme]
    poor = {pair: round(ratio(palette, *pair), 2) for pair in TEXT if ratio(palette, *pair) < 4.5}
    assert poor == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_edges_have_a_contrast_of_at_least_3(theme: str) -> None:
    palette = blocks()[theme]
    poor = {pair: round(ratio(palette, *pair), 2) for pair in EDGES if ratio(palette, *pair) < 3}
    assert poor == {}


def test_dark_is_the_same_by_system_and_by_choice() -> None:
    colours = blocks()
    assert colours["system"] == colours["dark"]


def test_dark_changes_every_colour_of_light() -> None:
    colours = blocks()
    literal = {name for name, value in colours["light"].items() if not value.startswith("var(")}
    assert literal <= colours["dark"].keys()


def test_only_the_tokens_name_colours() -> None:
    for sheet in CSS.glob("*.css"):
        if sheet.name != "tokens.css":
            assert re.findall(r"#[0-9a-f]{3,8}\b(?![^{]*\{)", sheet.read_text()) == [], sheet.name
