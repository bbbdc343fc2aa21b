"""What a client has received of a response, assembled from events or bodies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Choice:
    """One choice of a chat."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    logprobs: list[tuple[Any, ...]] = field(default_factory=list)
    roles: int = 0
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass
class Answer:
    """One response.

    Attributes:
        ids: its request ids in the ledger. content: the content of responses that are not chats.
        prompt_tokens, completion_tokens, reasoning_tokens: as reported to the client.
        digests: digests of the adapter's weights that connections reported: one, even if the
            adapter's alias was switched meanwhile.
        cached: all reported counts of cached prompt tokens: one, even if the stream was resumed.
        numerics_changed: the numerics at the end differ from those at the beginning.
        doubled: events or lines received twice. lost: why the response is incomplete; "" if it is
            complete.
        breaks: number of broken connections. refusals: number of responses with "retry later".
        longest: longest time in seconds without any data.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    content: Any = None
    ids: set[str] = field(default_factory=set)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    digests: set[str] = field(default_factory=set)
    cached: set[int] = field(default_factory=set)
    numerics_changed: bool = False
    doubled: int = 0
    lost: str = ""
    is_finished: bool = False
    breaks: int = 0
    refusals: int = 0
    longest: float = 0.0

    def record_usage(self, usage: dict[str, Any] | None) -> None:
        """Record the usage of a stream's last event, a response body or a batch line."""
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))
            output = usage.get("output_tokens", 0)
            self.completion_tokens = usage.get("completion_tokens", output)
            details = usage.get("completion_tokens_details") or {}
            self.reasoning_tokens = details.get("reasoning_tokens") or 0
            details = usage.get("prompt_tokens_details") or {}
            if self.completion_tokens:  # unknown before the first token
                self.cached.add(details.get("cached_tokens") or 0)
            self.numerics_changed = usage.get("numerics_changed", False)

    def record_chunk(self, chunk: dict[str, Any]) -> None:
        """Record one event of a chat's stream."""
        self.ids.add(chunk["id"])
        self.record_usage(chunk.get("usage"))
        for part in chunk["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            _add(choice, part["delta"], part.get("logprobs"))
            _end(choice, part)

    def record_chat(self, body: dict[str, Any]) -> None:
        """Record a chat's response body."""
        self.ids.add(body["id"])
        self.record_usage(body["usage"])
        for part in body["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            _add(choice, part["message"], part.get("logprobs"))
            _end(choice, part)

    @property
    def same(self) -> Any:
        """What no fault may change. Cached tokens may differ, but not within a response."""
        return (
            self.content,
            sorted(self.choices.items()),
            *(self.prompt_tokens, self.completion_tokens, self.reasoning_tokens),
            *(len(self.cached) > 1, self.numerics_changed, self.is_finished, sorted(self.digests)),
        )

    def differs(self, other: Answer) -> str:
        """Describe how `other` differs, with both values; "" if they are equal."""
        if self.same == other.same:
            return ""
        differences = [*_differing(self, other, AMONG_CHOICES)]
        for index in sorted(self.choices.keys() | other.choices.keys()):
            mine, theirs = self.choices.get(index), other.choices.get(index)
            if mine is None or theirs is None:
                differences.append(f"choice {index} is there once only")
            else:
                differing = _differing(mine, theirs, vars(mine))
                differences += [f"choice {index}: {one}" for one in differing]
        return "; ".join(differences) or "cached tokens from event to event"


AMONG_CHOICES = (
    *("content", "prompt_tokens", "completion_tokens", "reasoning_tokens"),
    *("digests", "numerics_changed", "is_finished"),
)


def _differing(mine: object, theirs: object, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        one, other = getattr(mine, name), getattr(theirs, name)
        if one != other:
            offset = _first_difference(one, other)
            yield f"{name} {str(one[offset:] if offset is not None else one)[:60]!r} and " + (
                f"{str(other[offset:] if offset is not None else other)[:60]!r}"
            )


def _first_difference(one: Any, other: Any) -> int | None:
    """Return the index of the first difference of two texts or lists; None for other types."""
    if not isinstance(one, str | list) or type(one) is not type(other):
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((offset for offset, (a, b) in pairs if a != b), min(len(one), len(other)))


def _end(choice: Choice, part: dict[str, Any]) -> None:
    if part["finish_reason"]:
        choice.finish_reason, choice.stop_reason = part["finish_reason"], part.get("stop_reason")


def _add(choice: Choice, part: dict[str, Any], logprobs: dict[str, Any] | None) -> None:
    choice.roles += "role" in part
    choice.text += part.get("content") or ""
    choice.reasoning += part.get("reasoning") or ""
    for call in part.get("tool_calls") or ():
        call_parts = choice.calls.setdefault(call.get("index", 0), ["", ""])
        call_parts[0] += call["function"].get("name") or ""
        call_parts[1] += call["function"].get("arguments") or ""
    for entry in (logprobs or {}).get("content") or ():
        top = [(one["token"], one["logprob"]) for one in entry.get("top_logprobs") or ()]
        choice.logprobs.append((entry["token"], entry["logprob"], top))
