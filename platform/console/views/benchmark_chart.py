"""Benchmarks on a model's page: the form, and curves of throughput against latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from catalog.models import ServedModel
from engine.contract.errors import InvalidRequest
from history.benchmarks import BenchmarkRun, access_benchmarks
from tenants.models import User

#: Maximum numbers of runs drawn as curves, and listed.
MAX_CURVES, MAX_LISTED = 4, 10
#: Initial values of the form.
DEFAULTS = {"levels": "1, 4, 16, 32", "input_tokens": 256, "output_tokens": 64, "num_requests": 32}
#: Size of the drawing, and the margins around its plot area.
WIDTH, HEIGHT = 640, 300
AXIS_X, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 60, 20, 16, 44


def parse_levels(text: str) -> list[int]:
    """Parse comma-separated numbers. Raises `InvalidRequest` (`levels`)."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise InvalidRequest("levels must be numbers separated by commas.", param="levels")
    return [int(part) for part in parts]


@dataclass(frozen=True)
class Point:
    """A concurrency level in the chart. `text`: its figures for display."""

    x: str
    y: str
    text: str


@dataclass(frozen=True)
class Curve:
    """The levels of a run. `tone`: number of its colour; `line`: the points of an SVG polyline."""

    tone: int
    run: BenchmarkRun
    points: list[Point]

    @property
    def line(self) -> str:
        """The points in the format of an SVG polyline."""
        return " ".join(f"{point.x},{point.y}" for point in self.points)


@dataclass(frozen=True)
class Tick:
    """A grid line: its position and label."""

    position: str
    label: str


@dataclass(frozen=True)
class Chart:
    """Output tokens per second against the median latency of a request; one curve per run."""

    curves: list[Curve]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


def benchmark_context(user: User, model: ServedModel) -> dict[str, Any]:
    """Template context of a model's benchmarks, for operators."""
    runs = list(access_benchmarks(user, model)[:MAX_LISTED])
    return {
        "benchmarks": runs,
        "open_benchmark": next((run for run in runs if run.is_open), None),
        "benchmark_chart": draw([run for run in runs if run.results][:MAX_CURVES]),
        "benchmark_defaults": DEFAULTS,
    }


def draw(runs: Sequence[BenchmarkRun]) -> Chart | None:
    """The chart of the results of some runs; None if there are none."""
    rows = [row for run in runs for row in run.results]
    if not rows:
        return None
    x_step, x_end = _scale(max(row["e2e_p50_ms"] / 1000 for row in rows))
    y_step, y_end = _scale(max(row["output_tok_s"] for row in rows))

    width, height = WIDTH - AXIS_X - MARGIN_RIGHT, HEIGHT - MARGIN_TOP - MARGIN_BOTTOM

    def x_of(seconds: float) -> str:
        return f"{AXIS_X + width * seconds / x_end:.1f}"

    def y_of(rate: float) -> str:
        return f"{MARGIN_TOP + height * (1 - rate / y_end):.1f}"

    curves = []
    for tone, run in enumerate(runs):
        points = [
            Point(
                x_of(row["e2e_p50_ms"] / 1000),
                y_of(row["output_tok_s"]),
                f"{row['concurrency']} in flight: {row['output_tok_s']:,.1f} tok/s, median latency "
                f"{row['e2e_p50_ms'] / 1000:,.2f} s",
            )
            for row in run.results
        ]
        curves.append(Curve(tone, run, points))
    return Chart(curves, _ticks(x_step, x_end, x_of), _ticks(y_step, y_end, y_of))


def _scale(highest: float) -> tuple[float, float]:
    """Return the step between grid lines and the end of the axis: at most five round steps."""
    raw = max(highest, 1e-6) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return step, step * math.ceil(highest / step - 1e-9)


def _ticks(step: float, end: float, position: Any) -> list[Tick]:
    digits = max(0, -math.floor(math.log10(step)))
    count = round(end / step)
    return [Tick(position(n * step), f"{n * step:,.{digits}f}") for n in range(count + 1)]
