"""Names of `vllm.engine.metrics`."""

from engine.contract.unavailable import (
    LoggingStatLogger,
    PrometheusStatLogger,
    RayPrometheusStatLogger,
)
from engine.v1.metrics.loggers import StatLoggerBase

__all__ = [
    "LoggingStatLogger",
    "PrometheusStatLogger",
    "RayPrometheusStatLogger",
    "StatLoggerBase",
]
