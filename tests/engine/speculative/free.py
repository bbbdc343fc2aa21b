"""Drafts that cost nothing, whatever this machine measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core import warmup as draft_timing
from engine.speculative.loss_bound import LossBound
from engine.speculative.planner import Planner
from engine.speculative.step_times import StepTimes

if TYPE_CHECKING:
    import pytest


def make_drafts_free(monkeypatch: pytest.MonkeyPatch, *, timed: bool = False) -> None:
    """Wider steps take no longer, and no tenant pays for what drafts and looks take.

    Nothing is timed at the start, where nobody would note it: that took longer than most tests.

    Args:
        timed: a model's draws are, for it's a way of its own through whatever draws them.
    """
    if not timed:
        monkeypatch.setattr(draft_timing, "_time_model", lambda *_: None)
    monkeypatch.setattr(draft_timing, "_time_widths", lambda *_: None)
    monkeypatch.setattr(StepTimes, "record", lambda *_: None)
    monkeypatch.setattr(Planner, "record", lambda *_: None)  # so none goes without, to be compared
    monkeypatch.setattr(StepTimes, "widest", 10**6)
    monkeypatch.setattr(LossBound, "budget", lambda *_: 1e9)
    monkeypatch.setattr(LossBound, "can_look_up", lambda *_: True)
    monkeypatch.setattr(LossBound, "can_read", lambda *_: True)
    monkeypatch.setattr(LossBound, "can_draft", lambda *_: True)
