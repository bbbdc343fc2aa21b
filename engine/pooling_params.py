"""Names of `vllm.pooling_params`."""

from engine.contract.pooling_params import PoolingParams

__all__ = ["PoolingParams"]
