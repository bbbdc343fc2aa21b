"""Names of `vllm.v1.metrics.reader`."""

from engine.offline.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
