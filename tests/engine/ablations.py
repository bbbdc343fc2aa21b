"""Engines that are made without something, see `kernels.ablations`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from kernels.ablations import VARIABLE


@contextmanager
def without(*names: str) -> Iterator[None]:
    """What is loaded within does without what is named; nothing named: it has everything."""
    with patch.dict(os.environ, {VARIABLE: ",".join(names)}):
        yield
