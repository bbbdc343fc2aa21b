"""Imports without what a library would load only because it's installed."""

import sys
from importlib import import_module


def import_blocking(name: str, *absent: str) -> None:
    """Import a module as it's imported where others aren't installed.

    Args:
        name: the module. Nothing happens if it's loaded already.
        absent: modules that it can do without, and that this process has no use for in it. One
            that is loaded already is no reason to block it.
    """
    if name in sys.modules:
        return
    blocked = [module for module in absent if module not in sys.modules]
    for module in blocked:  # Python's own sign for: not to be found
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        import_module(name)
    finally:
        for module in blocked:
            del sys.modules[module]


def import_redis() -> None:
    """redis-py without OpenTelemetry, which it would count its own commands with if it were asked.

    To load that takes a tenth of a process's start.
    """
    import_blocking("redis.asyncio", "opentelemetry")
