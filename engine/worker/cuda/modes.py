"""CUDA graph modes, and what becomes of one that the backend or the model can't do."""

from __future__ import annotations

import enum
import logging

from kernels.attention import GraphSupport

log = logging.getLogger(__name__)


class RuntimeMode(enum.Enum):
    """How one batch runs."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


class GraphMode(enum.Enum):
    """What an operator asks for: how decode batches run, and how all others do.

    PIECEWISE captures everything but attention, which runs between the pieces; FULL captures
    attention too, so its backend must allow for it.
    """

    NONE = (RuntimeMode.NONE, RuntimeMode.NONE)
    PIECEWISE = (RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE)
    FULL = (RuntimeMode.FULL, RuntimeMode.FULL)
    FULL_DECODE_ONLY = (RuntimeMode.FULL, RuntimeMode.NONE)
    FULL_AND_PIECEWISE = (RuntimeMode.FULL, RuntimeMode.PIECEWISE)

    @property
    def decode(self) -> RuntimeMode:
        """Of batches in which all sequences have equally few tokens."""
        return self.value[0]

    @property
    def mixed(self) -> RuntimeMode:
        """Of all other batches."""
        return self.value[1]


LEVELS = {
    0: GraphMode.NONE,
    1: GraphMode.PIECEWISE,
    2: GraphMode.FULL_AND_PIECEWISE,
    3: GraphMode.FULL_AND_PIECEWISE,
}
"""The mode of each optimisation level."""


def wanted_mode(name: str | None, level: int, enforce_eager: bool) -> GraphMode:
    """By the settings: `enforce_eager`, then the mode's name, then the level's default."""
    if enforce_eager:
        return GraphMode.NONE
    return LEVELS[level] if name is None else GraphMode[name]


def resolve_mode(
    wanted: GraphMode, support: GraphSupport, query_len: int = 1, obstacle: str | None = None
) -> GraphMode:
    """The nearest mode that works; a log line says when it's another.

    Args:
        support: what the attention backend can be captured in.
        query_len: tokens of a sequence in a decode batch; more than 1 with speculation.
        obstacle: why the model can't be captured at all.
    """
    if wanted is GraphMode.NONE:
        return wanted
    if obstacle is not None:
        return _downgraded(wanted, GraphMode.NONE, obstacle)
    single = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    needed = single if query_len == 1 else GraphSupport.UNIFORM_BATCH
    if wanted.decode is RuntimeMode.FULL and support < needed:
        reason = f"the attention backend can be captured {support.name.lower()}"
        return _downgraded(wanted, GraphMode.PIECEWISE, reason)
    if wanted.mixed is RuntimeMode.FULL and support < GraphSupport.ALWAYS:
        reason = "the attention backend can be captured in uniform batches alone"
        return _downgraded(wanted, GraphMode.FULL_AND_PIECEWISE, reason)
    return wanted


def _downgraded(wanted: GraphMode, to: GraphMode, reason: str) -> GraphMode:
    log.warning("CUDA graphs: %s instead of %s: %s.", to.name, wanted.name, reason)
    return to
