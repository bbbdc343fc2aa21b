"""Imports of libraries without optional dependencies that they load if installed."""

import sys
from importlib import import_module


def import_blocking(name: str, *absent: str) -> None:
    """Import a module as if certain other modules weren't installed.

    Args:
        name: the module. Nothing happens if it is already loaded.
        absent: optional dependencies to hide. Those that are already loaded aren't hidden.
    """
    if name in sys.modules:
        return
    blocked = [module for module in absent if module not in sys.modules]
    for module in blocked:  # None in sys.modules makes an import fail
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        import_module(name)
    finally:
        for module in blocked:
            del sys.modules[module]


def import_redis() -> None:
    """Import redis-py without OpenTelemetry, which it would only use for metrics of its own.

    Loading OpenTelemetry takes a tenth of a process's start.
    """
    import_blocking("redis.asyncio", "opentelemetry")
