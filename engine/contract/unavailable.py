"""Names of vLLM that can be imported but not used: the error says what to use instead."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import ConfigError

_MEDIA = (
    "media are prepared by the processor of the model's folder. Give a model class `encode` of "
    "`SupportsMultiModal`, and register it with `ModelRegistry`."
)
_STATISTICS = (
    "each replica logs its statistics and serves them at /metrics. For others install a subclass "
    "of `StatLogger` as an entry point of `quire.stat_loggers`."
)


def _refuse(name: str, reason: str) -> ConfigError:
    return ConfigError(f"{name} can't be used: {reason}", param=name)


class UnavailableRegistry:
    """A registry that accepts nothing: using any of its methods raises `ConfigError`."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __getattr__(self, method: str) -> Any:
        # Protocols that Python or a tool tries (copying, `inspect`) are absent, as for any object.
        if method.startswith("_"):
            raise AttributeError(method)
        raise _refuse(self._name, self._reason)


class _Unavailable:
    """Base of classes that can be neither instantiated nor subclassed: `ConfigError`."""

    _reason: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _refuse(cls.__name__, cls._reason)

    def __init_subclass__(cls, /, **kwargs: Any) -> None:
        base = cls.__mro__[1]
        if base is not _Unavailable:
            raise _refuse(base.__name__, cls._reason)


class InputContext(_Unavailable):
    """vLLM's context of an input processor."""

    _reason = _MEDIA


class InputRegistry(_Unavailable):
    """vLLM's registry of input processors."""

    _reason = _MEDIA


class LoggingStatLogger(_Unavailable):
    """vLLM's logger of statistics."""

    _reason = _STATISTICS


class PrometheusStatLogger(_Unavailable):
    """vLLM's exporter of statistics to Prometheus."""

    _reason = _STATISTICS


class RayPrometheusStatLogger(_Unavailable):
    """vLLM's exporter of statistics to Ray's metrics."""

    _reason = _STATISTICS


INPUT_REGISTRY = UnavailableRegistry("INPUT_REGISTRY", _MEDIA)
MULTIMODAL_REGISTRY = UnavailableRegistry("MULTIMODAL_REGISTRY", _MEDIA)
