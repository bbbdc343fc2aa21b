"""A request's record as a list of what happened, and as a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from metering.models import RequestEntry

WIDTH, TOP, BAR = 1000, 8, 22
GRAPH = 120
#: Why nothing of a prompt was cached, in a person's words.
CACHE_MISS_TEXT = {
    "no_shared_prefix": "no earlier prompt begins like it",
    "shorter_than_a_block": "it is shorter than one cache block",
    "evicted": "the prefix that it shares was evicted",
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
#: The same for requests that generate nothing.
POOLED = "result ready"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `links`: ids of requests of the same tenant that it names."""

    at_ms: float
    title: str
    text: str = ""
    kind: str = ""
    links: tuple[str, ...] = ()


@dataclass(slots=True)
class TimelineChart:
    """What the page draws, in units of a picture `WIDTH` wide.

    `bars`: {kind, title, x, width}. `marks`: {x, title}. `polyline`: points of tokens over time.
    """

    height: int
    end_ms: float
    bars: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    polyline: str = ""
    max_tokens: int = 0
    base: int = 0


def timeline_events(entry: RequestEntry, story: dict[str, Any]) -> list[Event]:
    """In the order of their moments."""
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
        several = f"output {output['number']}.{output['index']}: "
        if is_pooled(story):
            several = f"prompt {output['number']}: "
        name = several if len(story["outputs"]) > 1 else ""
        events += _of_output(output, placed_ms(story), name)
    if story["numerics_changed"]:
        last = story["hops"][-1]["at_ms"] if story["hops"] else 0.0
        events.append(Event(last, "Other numerics", "the next replica computes other bits", "wait"))
    if entry.ttft_ms is not None:
        events.append(Event(entry.ttft_ms, "First token"))
    events.append(_end(entry, story))
    return sorted(events, key=lambda event: event.at_ms)


def is_pooled(story: dict[str, Any]) -> bool:
    """Whether it asked for vectors, labels or scores, not for text."""
    return "task" in story["sampling"]


def placed_ms(story: dict[str, Any]) -> float:
    """When a replica first had it."""
    return float(story["hops"][0]["at_ms"]) if story["hops"] else float(story["admitted_ms"])


def _limits(limits: dict[str, int]) -> str:
    told = [
        f"{limits[f'remaining_{kind}']} of {limits[f'limit_{kind}']} {kind} a minute left"
        for kind in ("requests", "tokens")
        if f"limit_{kind}" in limits
    ]
    if (most := limits.get("output_tokens")) is not None:
        told.append(f"at most {most} tokens of output reserved")
    return ", ".join(told) or "no limit applies"


def _of_output(output: dict[str, Any], placed: float, name: str) -> list[Event]:
    """What the engine's record of one output says."""
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
    for at in output["preempted_at"]:
        text = f"{name}its blocks were given to others; its tokens are computed again"
        events.append(Event(placed + at, "Preempted", text, "wait"))
    if output["drafts"]:
        text = f"{name}{output['accepted']} of {output['drafts']} draft tokens accepted"
        if output["drafted"]:
            text += f", {output['drafted']:g} tokens a step with drafts"
        events.append(Event(started + output["prefill_ms"], "Drafts", text))
    return events


def _queue_text(ahead: dict[str, Any]) -> str:
    """Behind whom it was: others' work has no names."""
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
    """Bars for queue, prompt and output of each output, and tokens over time below them."""
    outputs = [each for each in story["outputs"] if each["steps"]]
    if not outputs or entry.duration_ms <= 0:
        return None
    end = max(entry.duration_ms, 1.0)
    placed, scale = placed_ms(story), WIDTH / end
    graph = GRAPH if story["tokens_over_time"] else 0
    height = TOP + len(outputs) * (BAR + 6) + graph + 30
    picture = TimelineChart(height, end, base=height - 22)
    for row, output in enumerate(outputs):
        at, top = placed, TOP + row * (BAR + 6)
        for kind in ("queue", "prefill", "decode"):
            long = output[f"{kind}_ms"]
            picture.bars.append(
                {
                    "kind": kind,
                    "x": _n(min(at, end) * scale),
                    "y": top,
                    "width": _n(max(1.0, min(long, end - min(at, end)) * scale)),
                    "title": f"{_NAMES[kind]}: {_ms(long)}",
                }
            )
            at += long
        for chunk, tokens in output["chunks"]:
            mark = {"x": _n(min(placed + chunk, end) * scale), "y": top, "kind": "chunk"}
            picture.marks.append({**mark, "title": f"{tokens} tokens of the prompt"})
        for moment in output["preempted_at"]:
            mark = {"x": _n(min(placed + moment, end) * scale), "y": top, "kind": "preempted"}
            picture.marks.append({**mark, "title": "preempted"})
    _draw_tokens(picture, story["tokens_over_time"], scale)
    return picture


_NAMES = {"queue": "Queued", "prefill": "Prompt", "decode": "Output"}


def _draw_tokens(picture: TimelineChart, points: list[Any], scale: float) -> None:
    if not points:
        return
    picture.max_tokens = points[-1][1]
    high = GRAPH / max(1, picture.max_tokens)
    picture.polyline = " ".join(
        f"{_n(min(at, picture.end_ms) * scale)},{_n(picture.base - count * high)}"
        for at, count in [(points[0][0], 0), *points]
    )


def _n(value: float) -> str:
    """A number as SVG takes it, whatever the language."""
    return f"{value:.1f}"


def _ms(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
