"""Products with quantized weights: int8 and fp8 with quantized activations, int4 by unpacking."""

from kernels.triton.quantized.linear import (
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    coded_linear,
    quantized_linear,
)
from kernels.triton.quantized.moe import GroupedExperts, grouped_experts

__all__ = [
    "Fp8Linear",
    "GroupedExperts",
    "Int4Linear",
    "Int8Linear",
    "QuantizedLinear",
    "coded_linear",
    "grouped_experts",
    "quantized_linear",
]
