"""A request's record as a list of events and as a chart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from metering.models import RequestEntry

WIDTH, TOP, BAR = 1000, 8, 22
GRAPH = 120
#: Descriptions of `FlightRecord.cold_reason`.
CACHE_MISS_TEXT = {
    "no_shared_prefix": "no earlier prompt begins like it",
    "shorter_than_a_block": "it is shorter than one cache block",
    "evicted": "the prefix that it shares was evicted",
    "no_state": "no state is cached where its prefix ends",
    "caching_off": "prefix caching is off",
    "all_tokens_needed": "this request needs every token of its prompt computed",
}
REASONS = {
    "stop": "model finished or stop sequence reached",
    "length": "token limit reached",
    "abort": "aborted",
    "error": "failed",
    "budget": "budget or reserved tokens used up",
    "repetition": "repetition detected",
}
#: Replaces the finish reason "stop" of pooling requests.
POOLED = "result ready"


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a request. `links`: ids of the same tenant's requests that it mentions."""

    at_ms: float
    title: str
    text: str = ""
    kind: str = ""
    links: tuple[str, ...] = ()


@dataclass(slots=True)
class TimelineChart:
    """Chart of a request, in units of an SVG drawing `WIDTH` wide.

    `bars`: {kind, title, x, width}. `marks`: {x, title}. `polyline`: output tokens over time.
    """

    height: int
    end_ms: float
    bars: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    polyline: str = ""
    max_tokens: int = 0
    base: int = 0


def timeline_events(entry: RequestEntry, story: dict[str, Any]) -> list[Event]:
    """The events of a request in chronological order."""
    events = [Event(0.0, "Received", f"for {entry.model}" if entry.model else "")]
    if story["outputs"] or story["hops"]:
        events.append(Event(story["admitted_ms"], "Limits checked", _limits(story["limits"])))
    for hop in story["hops"]:
        if hop.get("reason"):
            text = f"{hop['replica']}: {hop['reason']}"
            events.append(Event(hop["at_ms"], "Left its replica", text, "wait"))
        else:
            events.append(Event(hop["at_ms"], "Sent to a replica", hop["replica"]))
    for output in story["outputs"]:
        name = f"output {output['number']}.{output['index']}: "
        if is_pooled(story):
            name = f"prompt {output['number']}: "
        if len(story["outputs"]) == 1:
            name = ""
        events += _output_events(output, placed_ms(story), name)
    if story["numerics_changed"]:
        last = story["hops"][-1]["at_ms"] if story["hops"] else 0.0
        events.append(Event(last, "Other numerics", "the next replica computes other bits", "wait"))
    if entry.ttft_ms is not None:
        events.append(Event(entry.ttft_ms, "First token"))
    events.append(_end(entry, story))
    return sorted(events, key=lambda event: event.at_ms)


def is_pooled(story: dict[str, Any]) -> bool:
    """Whether the request asked for embeddings, labels or scores instead of text."""
    return "task" in story["sampling"]


def placed_ms(story: dict[str, Any]) -> float:
    """Time of the first dispatch to a replica, in milliseconds since arrival."""
    return float(story["hops"][0]["at_ms"]) if story["hops"] else float(story["admitted_ms"])


def _limits(limits: dict[str, int]) -> str:
    parts = [
        f"{limits[f'remaining_{kind}']} of {limits[f'limit_{kind}']} {kind} per minute left"
        for kind in ("requests", "tokens")
        if f"limit_{kind}" in limits
    ]
    if (max_tokens := limits.get("output_tokens")) is not None:
        parts.append(f"at most {max_tokens} tokens of output reserved")
    return ", ".join(parts) or "no limit applies"


def _output_events(output: dict[str, Any], placed: float, name: str) -> list[Event]:
    """The events of one output, from the engine's record."""
    if not output["steps"] and not output["queue_ms"]:
        return []
    events = [
        Event(
            placed,
            "Queued",
            f"{name}{_ms(output['queue_ms'])}{_queue_text(output['ahead'])}",
            "wait" if output["queue_ms"] >= 1 else "",
            tuple(output["behind"]),
        )
    ]
    started = placed + output["queue_ms"]
    if output["cached"]:
        events.append(Event(started, "Cache hit", f"{name}{output['cached']} tokens of the prompt"))
    elif output["cold"]:
        events.append(
            Event(
                started,
                "Cache miss",
                f"{name}{CACHE_MISS_TEXT.get(output['cold'], output['cold'])}",
            )
        )
    if output["num_chunks"]:
        sizes = " + ".join(str(tokens) for _, tokens in output["chunks"][:8])
        more = " ..." if output["num_chunks"] > 8 else ""
        word = "chunk" if output["num_chunks"] == 1 else "chunks"
        text = f"{name}{output['num_chunks']} {word}: {sizes}{more} tokens"
        events.append(Event(placed + output["chunks"][0][0], "Prompt computed", text))
    for preempted_ms in output["preempted_at"]:
        text = f"{name}its blocks were given to others; its tokens are computed again"
        events.append(Event(placed + preempted_ms, "Preempted", text, "wait"))
    if output["drafts"]:
        text = f"{name}{output['accepted']} of {output['drafts']} draft tokens accepted"
        if output["drafted"]:
            text += f", {output['drafted']:g} tokens a step with drafts"
        events.append(Event(started + output["prefill_ms"], "Drafts", text))
    return events


def _queue_text(ahead: dict[str, Any]) -> str:
    """The number of requests ahead in the queue; those of other tenants stay anonymous."""
    parts = []
    if ahead["own"]:
        parts.append(f"{ahead['own']} of this tenant's own")
    if ahead.get("num_others"):
        parts.append(f"{ahead['num_others']} of other tenants'")
    elif ahead["others"]:
        parts.append("other tenants' work")
    return f", with {' and '.join(parts)} running or waiting" if parts else ", with nothing ahead"


def _end(entry: RequestEntry, story: dict[str, Any]) -> Event:
    if entry.code:
        title = "Refused" if entry.request_id.startswith("refused-") else "Failed"
        return Event(entry.duration_ms, title, story["message"], "failed")
    if entry.status == 499:
        return Event(entry.duration_ms, "The client disconnected", "", "failed")
    reason = REASONS.get(entry.finish_reason, entry.finish_reason)
    if entry.finish_reason == "stop" and is_pooled(story):
        reason = POOLED
    return Event(entry.duration_ms, "Ended", reason, "well")


def timeline_chart(entry: RequestEntry, story: dict[str, Any]) -> TimelineChart | None:
    """Bars of queueing, prefill and decode for each output, with tokens over time below them."""
    outputs = [output for output in story["outputs"] if output["steps"]]
    if not outputs or entry.duration_ms <= 0:
        return None
    placed = placed_ms(story)
    # Bars use the replica's clock, the rest the gateway's: the chart must be long enough for both.
    ends = (sum(output[f"{kind}_ms"] for kind in _NAMES) for output in outputs)
    end = max(entry.duration_ms, placed + max(ends), 1.0)
    scale = WIDTH / end
    graph = GRAPH if story["tokens_over_time"] else 0
    height = TOP + len(outputs) * (BAR + 6) + graph + 30
    chart = TimelineChart(height, end, base=height - 22)
    for row, output in enumerate(outputs):
        start_ms, y = placed, TOP + row * (BAR + 6)
        for kind in ("queue", "prefill", "decode"):
            duration_ms = output[f"{kind}_ms"]
            chart.bars.append(
                {
                    "kind": kind,
                    "x": _n(min(start_ms, end) * scale),
                    "y": y,
                    "width": _n(max(1.0, min(duration_ms, end - min(start_ms, end)) * scale)),
                    "title": f"{_NAMES[kind]}: {_ms(duration_ms)}",
                }
            )
            start_ms += duration_ms
        for chunk_ms, tokens in output["chunks"]:
            mark = {"x": _n(min(placed + chunk_ms, end) * scale), "y": y, "kind": "chunk"}
            chart.marks.append({**mark, "title": f"{tokens} tokens of the prompt"})
        for preempted_ms in output["preempted_at"]:
            mark = {"x": _n(min(placed + preempted_ms, end) * scale), "y": y, "kind": "preempted"}
            chart.marks.append({**mark, "title": "preempted"})
    _draw_tokens(chart, story["tokens_over_time"], scale)
    return chart


_NAMES = {"queue": "Queued", "prefill": "Prompt", "decode": "Output"}


def _draw_tokens(chart: TimelineChart, points: list[Any], scale: float) -> None:
    if not points:
        return
    chart.max_tokens = points[-1][1]
    y_scale = GRAPH / max(1, chart.max_tokens)
    chart.polyline = " ".join(
        f"{_n(min(moment, chart.end_ms) * scale)},{_n(chart.base - count * y_scale)}"
        for moment, count in [(points[0][0], 0), *points]
    )


def _n(value: float) -> str:
    """Format a number for SVG, independent of the locale."""
    return f"{value:.1f}"


def _ms(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
