"""Kernels run in Triton's interpreter here."""

from tests.interpreter import quicken

quicken()
