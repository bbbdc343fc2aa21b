"""Names of `vllm.sequence`."""

from engine.offline.outputs import RequestMetrics

__all__ = ["RequestMetrics"]
