"""Low-rank adapters of a batch in which each row has its own, in two launches a linear layer."""

from kernels.triton.lora.slots import TritonLora, TritonLoraSlots

__all__ = ["TritonLora", "TritonLoraSlots"]
