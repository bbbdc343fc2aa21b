"""ggml's types of tensors: how many values a block holds, and in how many bytes. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """A type. Floats are blocks of one value."""

    name: str
    values: int
    nbytes: int


F32, F16, BF16 = 0, 1, 30
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 2, 3, 6, 7, 8
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = 10, 11, 12, 13, 14
IQ4_NL, IQ4_XS, MXFP4 = 20, 23, 39

BLOCKS = {
    F32: Block("F32", 1, 4),
    F16: Block("F16", 1, 2),
    Q4_0: Block("Q4_0", 32, 18),
    Q4_1: Block("Q4_1", 32, 20),
    Q5_0: Block("Q5_0", 32, 22),
    Q5_1: Block("Q5_1", 32, 24),
    Q8_0: Block("Q8_0", 32, 34),
    Q2_K: Block("Q2_K", 256, 84),
    Q3_K: Block("Q3_K", 256, 110),
    Q4_K: Block("Q4_K", 256, 144),
    Q5_K: Block("Q5_K", 256, 176),
    Q6_K: Block("Q6_K", 256, 210),
    IQ4_NL: Block("IQ4_NL", 32, 18),
    IQ4_XS: Block("IQ4_XS", 256, 136),
    MXFP4: Block("MXFP4", 32, 17),
    BF16: Block("BF16", 1, 2),
}
"""Those that are read, by ggml's number."""

_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0",
}  # fmt: skip


def name_of(kind: int) -> str:
    """ggml's name of a type."""
    known = BLOCKS.get(kind)
    return known.name if known else _OTHERS.get(kind, f"type {kind}")
