"""Errors of choosing kernels."""

from __future__ import annotations


class KernelsUnavailable(ValueError):
    """The kernels that are asked for don't exist or can't run here; the message says why."""
