"""The usage page's chart: one column per day, stacked by model, key, person or adapter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal

from django.contrib.humanize.templatetags.humanize import intcomma

from console.templatetags.console import cost
from metering.access import UsageTotals

HEIGHT = 100
#: Maximum number of groups with their own colour; the others are added up.
MAX_SERIES = 6
OTHER_GROUPS = "others"


@dataclass(frozen=True)
class Segment:
    """Part of a column, in units of a drawing `HEIGHT` high. `tone`: number of its colour."""

    tone: int
    top: str
    height: str


@dataclass(frozen=True)
class Column:
    """A day. `text`: its total, formatted."""

    day: date
    text: str
    segments: list[Segment]


@dataclass(frozen=True)
class UsageChart:
    """`top`: total of the highest column, formatted; `series`: [(tone, name, formatted total)]."""

    top: str
    unit: str
    columns: list[Column]
    series: list[tuple[int, str, str]]


def usage_chart(
    totals: Sequence[UsageTotals], names: Sequence[str], first: date, last: date
) -> UsageChart | None:
    """Build the chart of cost, or of tokens if no usage has a cost.

    Args:
        totals: of each day and group; names: display name of the group of each total.
        first, last: days of the chart, both included.
    """
    value, text = _measure(totals)
    by_name: dict[str, int] = defaultdict(int)
    for sums, name in zip(totals, names, strict=True):
        by_name[name] += value(sums)
    largest = sorted((name for name in by_name if by_name[name]), key=lambda name: -by_name[name])
    if not largest:
        return None
    tones = {name: tone for tone, name in enumerate(largest[:MAX_SERIES])}
    series = [(tone, name, text(by_name[name])) for name, tone in tones.items()]
    if small_names := largest[MAX_SERIES:]:
        series.append((len(tones), OTHER_GROUPS, text(sum(by_name[name] for name in small_names))))
    by_day: dict[date, list[int]] = defaultdict(lambda: [0] * len(series))
    for sums, name in zip(totals, names, strict=True):
        if value(sums):
            by_day[sums.start.date()][tones.get(name, len(tones))] += value(sums)
    highest = max(sum(values) for values in by_day.values())
    days = [first + timedelta(days=n) for n in range((last - first).days + 1)]
    return UsageChart(
        top=text(highest),
        unit="cost" if value is _cost else "tokens",
        columns=[Column(day, text(sum(by_day[day])), _stack(by_day[day], highest)) for day in days],
        series=series,
    )


def _measure(totals: Sequence[UsageTotals]) -> tuple[Callable[..., int], Callable[[int], str]]:
    """Return the function for the charted value of a total, and its formatter."""
    if any(sums.cost_nanos for sums in totals):
        return _cost, cost
    return _tokens, lambda tokens: f"{intcomma(tokens)} tokens"


def _cost(sums: UsageTotals) -> int:
    return sums.cost_nanos


def _tokens(sums: UsageTotals) -> int:
    return sums.prompt_tokens + sums.completion_tokens


def _stack(values: Sequence[int], highest: int) -> list[Segment]:
    """Return the segments of a column, the bottom one first."""
    segments, base = [], Decimal(HEIGHT)
    for tone, value in enumerate(values):
        height = Decimal(HEIGHT * value) / highest
        base -= height
        if value:
            segments.append(Segment(tone, f"{max(base, Decimal(0)):.2f}", f"{height:.2f}"))
    return segments
