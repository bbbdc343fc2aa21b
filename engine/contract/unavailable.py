"""Names of vLLM that can be imported but not used: the error says what to use instead."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import ConfigError

_STATISTICS = (
    "each replica logs its statistics and serves them at /metrics. For others install a subclass "
    "of `StatLogger` as an entry point of `quire.stat_loggers`."
)


def _refuse(name: str, reason: str) -> ConfigError:
    return ConfigError(f"{name} can't be used: {reason}", param=name)


class _Unavailable:
    """Base of classes that can be neither instantiated nor subclassed: `ConfigError`."""

    _reason: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _refuse(cls.__name__, cls._reason)

    def __init_subclass__(cls, /, **kwargs: Any) -> None:
        base = cls.__mro__[1]
        if base is not _Unavailable:
            raise _refuse(base.__name__, cls._reason)


class LoggingStatLogger(_Unavailable):
    """vLLM's logger of statistics."""

    _reason = _STATISTICS


class PrometheusStatLogger(_Unavailable):
    """vLLM's exporter of statistics to Prometheus."""

    _reason = _STATISTICS


class RayPrometheusStatLogger(_Unavailable):
    """vLLM's exporter of statistics to Ray's metrics."""

    _reason = _STATISTICS
