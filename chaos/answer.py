"""What a client has of an answer in the end, put together from what came."""

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
    """One answer.

    Attributes:
        ids: under which the ledger has it. content: what isn't a chat's choices.
        prompt_tokens, completion_tokens, reasoning_tokens: as the client was told.
        digests: of the adapter's weights, as connections were told: one, however its name turned.
        cached: every count of cached prompt tokens that it was told: one, whatever was resumed.
        numerics_changed: other bits were computed at the end than at the beginning.
        doubled: events or lines that came twice. lost: why there is no whole answer; "": there is.
        breaks: connections that broke. refusals: answers that said "later".
        longest: seconds in which nothing came.
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
        """What a stream's last event, a whole answer or a line of a batch says."""
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))
            output = usage.get("output_tokens", 0)
            self.completion_tokens = usage.get("completion_tokens", output)
            details = usage.get("completion_tokens_details") or {}
            self.reasoning_tokens = details.get("reasoning_tokens") or 0
            details = usage.get("prompt_tokens_details") or {}
            if self.completion_tokens:  # before the first token it isn't known
                self.cached.add(details.get("cached_tokens") or 0)
            self.numerics_changed = usage.get("numerics_changed", False)

    def record_chunk(self, chunk: dict[str, Any]) -> None:
        """One event of a chat's stream."""
        self.ids.add(chunk["id"])
        self.record_usage(chunk.get("usage"))
        for part in chunk["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            _add(choice, part["delta"], part.get("logprobs"))
            _end(choice, part)

    def record_chat(self, body: dict[str, Any]) -> None:
        """A chat's whole answer."""
        self.ids.add(body["id"])
        self.record_usage(body["usage"])
        for part in body["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            _add(choice, part["message"], part.get("logprobs"))
            _end(choice, part)

    @property
    def same(self) -> Any:
        """What must not depend on any fault. What was cached may, but not from event to event."""
        return (
            self.content,
            sorted(self.choices.items()),
            *(self.prompt_tokens, self.completion_tokens, self.reasoning_tokens),
            *(len(self.cached) > 1, self.numerics_changed, self.is_finished, sorted(self.digests)),
        )

    def differs(self, other: Answer) -> str:
        """What is another in `other`, with both; "" where nothing is."""
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
    """From where two texts or lists differ; None: they are neither."""
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
