"""Small things of vLLM's that its programs import."""

from __future__ import annotations

import logging
import random
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


def AttentionConfig(**settings: Any) -> dict[str, Any]:
    """Return the setting `attention_config`; fields that are None are left out."""
    return {name: value for name, value in settings.items() if value is not None}


def CompilationConfig(mode: int | None = None, **settings: Any) -> dict[str, Any]:
    """Return the setting `compilation_config`; fields that are None are left out."""
    fields = {"mode": mode, **settings}
    return {name: value for name, value in fields.items() if value is not None}


@dataclass
class SequenceData:
    """Token ids of a prompt, as a `DummyDataFactory` makes them."""

    prompt_token_ids: list[int] = field(default_factory=list)


class UsageContext(StrEnum):
    """Kind of program that an engine runs in: accepted by engines, without effect. Quire reports
    its usage to nobody.
    """

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module."""
    return logging.getLogger(name)


def random_uuid() -> str:
    """Return a random id for a request."""
    return uuid.uuid4().hex


def set_random_seed(seed: int | None) -> None:
    """Seed Python's, NumPy's and torch's global generators; None leaves them alone.

    The engine uses none of these: a request's random numbers follow from its own seed.
    """
    import numpy
    import torch

    if seed is not None:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
