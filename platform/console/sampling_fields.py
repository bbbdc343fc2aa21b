"""The playground's sampling settings, with the ranges of `engine.contract.sampling_params`.

A test tries both ends of every range, and just beyond, on `SamplingParams` itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.sampling_params import MAX_STOP, MAX_STOP_CHARS

#: Whole numbers that a browser can hold without rounding.
MAX_SAFE_INTEGER = 2**53 - 1
_MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class SamplingField:
    """One field of the form.

    Attributes:
        name: as in `SamplingParams`.
        kind: "number", "integer" or "strings" (one a line).
        low, high: the range, both included, unless `low_open`.
        step: what a key press on the field changes.
        rest: where its slider stands while the field is empty; None: no slider.
        slide_to: the slider's upper end, where that's below `high`.
    """

    name: str
    label: str
    help: str
    kind: str = "number"
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    step: float = 0.05
    rest: float | None = None
    slide_to: float | None = None
    most: int = MAX_STOP
    chars: int = MAX_STOP_CHARS

    @property
    def slider_low(self) -> float | None:
        """The slider's lower end: the range's, or the first step above it when it's open."""
        return self.step if self.low_open else self.low

    @property
    def slider_high(self) -> float | None:
        """The slider's upper end."""
        return self.high if self.slide_to is None else self.slide_to


@dataclass(frozen=True)
class Group:
    """Fields under one heading."""

    title: str
    fields: tuple[SamplingField, ...]


_CHOICE = Group(
    "Choosing tokens",
    (
        SamplingField(
            "temperature",
            "Temperature",
            "0 always takes the likeliest token; higher values vary more.",
            low=0,
            high=100,
            rest=1,
            slide_to=2,
        ),
        SamplingField(
            "top_p",
            "Top p",
            "Only the likeliest tokens that together have this probability.",
            low=0,
            high=1,
            low_open=True,
            step=0.01,
            rest=1,
        ),
        SamplingField(
            "min_p",
            "Min p",
            "Only tokens at least this likely, relative to the likeliest one.",
            low=0,
            high=1,
            step=0.01,
            rest=0,
        ),
        SamplingField(
            "top_k",
            "Top k",
            "Only the k likeliest tokens; -1: all.",
            kind="integer",
            low=-1,
            high=_MAX_INT,
            step=1,
        ),
    ),
)
_LENGTH = Group(
    "Length",
    (
        SamplingField(
            "max_tokens",
            "Max tokens",
            "The longest answer; empty: as long as the context allows.",
            kind="integer",
            low=1,
            high=_MAX_INT,
            step=1,
        ),
        SamplingField(
            "stop", "Stop strings", "One per line; \\n stands for a new line.", kind="strings"
        ),
    ),
)
_REPETITION = Group(
    "Repetition",
    (
        SamplingField(
            "repetition_penalty",
            "Repetition penalty",
            "Above 1: tokens of the prompt and answer become less likely.",
            low=0,
            high=2,
            low_open=True,
            rest=1,
        ),
        SamplingField(
            "presence_penalty",
            "Presence penalty",
            "Above 0: tokens that the answer already has become less likely.",
            low=-2,
            high=2,
            rest=0,
        ),
        SamplingField(
            "frequency_penalty",
            "Frequency penalty",
            "Above 0: the more often a token occurs, the less likely it gets.",
            low=-2,
            high=2,
            rest=0,
        ),
    ),
)
_SEED = Group(
    "Repeatability",
    (
        SamplingField(
            "seed",
            "Seed",
            "The same seed gives the same answer to the same question.",
            kind="integer",
            low=0,
            high=MAX_SAFE_INTEGER,
            step=1,
        ),
    ),
)

GROUPS = (_CHOICE, _LENGTH, _REPETITION, _SEED)
