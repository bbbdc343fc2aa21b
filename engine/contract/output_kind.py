"""`RequestOutputKind`: what an offline request's outputs hold. Torch-free."""

from __future__ import annotations

from enum import Enum


class RequestOutputKind(Enum):
    """Under vLLM's names and numbers."""

    #: All from the output's beginning, each time.
    CUMULATIVE = 0
    #: What is new since the last time.
    DELTA = 1
    #: All of it, once, when the request has ended.
    FINAL_ONLY = 2
