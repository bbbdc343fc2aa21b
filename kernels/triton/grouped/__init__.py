"""Products of rows with one of several matrices each: mixtures of experts, and LoRA."""

from kernels.triton.grouped.align import Groups, align
from kernels.triton.grouped.experts import fused_experts
from kernels.triton.grouped.lora import lora_expand, lora_groups, lora_shrink
from kernels.triton.grouped.route import route

__all__ = ["Groups", "align", "fused_experts", "lora_expand", "lora_groups", "lora_shrink", "route"]
