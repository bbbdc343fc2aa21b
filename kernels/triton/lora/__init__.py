"""Low-rank adapters, which may differ by row, in two launches per linear layer."""

from kernels.triton.lora.slots import TritonLora, TritonLoraSlots

__all__ = ["TritonLora", "TritonLoraSlots"]
