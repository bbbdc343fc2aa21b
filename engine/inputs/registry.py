"""Names of `vllm.inputs.registry`."""

from engine.contract.unavailable import InputContext, InputRegistry

__all__ = ["InputContext", "InputRegistry"]
