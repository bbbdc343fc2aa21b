"""Percentiles, and the lines that a benchmark prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) by linear interpolation; NaN for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread_ms(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90 and p99 in milliseconds, as `{name}_p50_ms` and so on."""
    mean = sum(seconds) / len(seconds) if seconds else float("nan")
    row = {f"{name}_mean_ms": mean * 1000}
    for q in (50, 90, 99):
        row[f"{name}_p{q}_ms"] = percentile(seconds, q) * 1000
    return {key: round(value, 2) for key, value in row.items()}


def table(row: dict[str, Any]) -> str:
    """The row as aligned lines for a person."""
    width = max(len(key) for key in row)
    return "\n".join(f"  {key:<{width}}  {_show(value)}" for key, value in row.items())


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
