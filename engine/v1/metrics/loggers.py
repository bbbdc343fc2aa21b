"""Names of `vllm.v1.metrics.loggers`."""

from engine.contract.stat_loggers import StatLogger
from engine.contract.unavailable import LoggingStatLogger, PrometheusStatLogger

__all__ = ["LoggingStatLogger", "PrometheusStatLogger", "StatLogger", "StatLoggerBase"]

StatLoggerBase = StatLogger
