"""Names of `vllm.v1.metrics.ray_wrappers`."""

from engine.contract.unavailable import RayPrometheusStatLogger

__all__ = ["RayPrometheusStatLogger"]
