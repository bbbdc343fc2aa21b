"""Imports without what a library would load only because it's installed."""

import sys
from importlib import import_module


def import_blocking(absent: str, name: str) -> None:
    """Import a module as it's imported where `absent` isn't installed.

    Args:
        absent: a module that it can do without, and that this process has no use for in it.
        name: the module. Nothing happens if either is loaded already.
    """
    if absent in sys.modules or name in sys.modules:
        return
    sys.modules[absent] = None  # type: ignore[assignment]  # Python's own sign for: not to be found
    try:
        import_module(name)
    finally:
        del sys.modules[absent]


def import_redis() -> None:
    """redis-py without OpenTelemetry, which it would count its own commands with if it were asked.

    To load that takes a tenth of a process's start.
    """
    import_blocking("opentelemetry", "redis.asyncio")
