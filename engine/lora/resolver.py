"""Names of `vllm.lora.resolver`."""

from engine.contract.plugins import LoRAResolver, LoRAResolverRegistry

__all__ = ["LoRAResolver", "LoRAResolverRegistry"]
