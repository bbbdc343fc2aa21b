"""Names of `vllm.v1.metrics.loggers`."""

from engine.contract.stat_loggers import StatLogger

__all__ = ["StatLogger", "StatLoggerBase"]

StatLoggerBase = StatLogger
