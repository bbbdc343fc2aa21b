"""Kernels run in Triton's interpreter here."""

from tests import made_once
from tests.interpreter import quicken
from tests.made_once import checkpoints_are_made_once  # noqa: F401

quicken()
made_once.quicken()
