"""Just enough of PromQL for tests: which series an expression asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_NAME = re.compile(r"(?<![\w:$\"])([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?")
_LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_WORDS = frozenset(
    (
        *("sum", "rate", "irate", "increase", "avg", "max", "min", "count", "by", "without", "le"),
        *("histogram_quantile", "absent", "up", "on", "ignoring", "and", "or", "unless", "delta"),
    )
)
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")


def series(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric's name with the labels that are matched."""
    bare = _RANGE.sub("", _GROUPING.sub("", expression))
    for name, matchers in _NAME.findall(bare):
        if name not in _WORDS:
            yield name, set(_LABEL.findall(matchers))


def grouped_by(expression: str) -> set[str]:
    """The labels that an expression groups by."""
    return {
        label.strip()
        for match in _GROUPING.findall(expression)
        for label in match.split(",")
        if label.strip() not in ("", "le")
    }


def board_expressions(board: dict[str, Any]) -> Iterator[str]:
    """Of all panels, rows' own included."""
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
        yield from board_expressions({"panels": panel.get("panels", [])})


def board(path: Path) -> dict[str, Any]:
    """A board of Grafana's."""
    return json.loads(path.read_text(encoding="utf-8"))


def alerts(path: Path) -> list[dict[str, Any]]:
    """The rules of a file of Prometheus's."""
    return [
        rule
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]
