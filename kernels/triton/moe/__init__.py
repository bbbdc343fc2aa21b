"""Products of rows with one of several matrices each, for mixtures of experts."""

from kernels.triton.moe.fused_moe import fused_experts, route
from kernels.triton.moe.grouped_gemm import Groups, align

__all__ = ["Groups", "align", "fused_experts", "route"]
