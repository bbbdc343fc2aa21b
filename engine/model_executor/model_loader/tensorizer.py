"""Names of `vllm.model_executor.model_loader.tensorizer`."""

from engine.offline.tensorizer import TensorizerArgs, TensorizerConfig, tensorize_vllm_model

__all__ = ["TensorizerArgs", "TensorizerConfig", "tensorize_vllm_model"]
