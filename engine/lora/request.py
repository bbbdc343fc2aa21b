"""Names of `vllm.lora.request`."""

from engine.contract.lora import LoRARequest

__all__ = ["LoRARequest"]
