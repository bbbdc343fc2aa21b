"""Products of rows with one of several matrices each: mixtures of experts."""

from kernels.triton.grouped.align import Groups, align
from kernels.triton.grouped.experts import fused_experts
from kernels.triton.grouped.route import route

__all__ = ["Groups", "align", "fused_experts", "route"]
