"""What happened when."""

from history.models.pool_sample import PoolSample
from history.models.traffic_sample import SUMS, TrafficSample

__all__ = ["SUMS", "PoolSample", "TrafficSample"]
