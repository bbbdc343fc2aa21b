"""ggml's types of tensors: how many values a block holds, and in how many bytes. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """A type. Floats are blocks of one value."""

    name: str
    values: int
    nbytes: int


F32, F16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K, BF16 = 0, 1, 2, 3, 6, 8, 12, 13, 14, 30

BLOCKS = {
    F32: Block("F32", 1, 4),
    F16: Block("F16", 1, 2),
    Q4_0: Block("Q4_0", 32, 18),
    Q4_1: Block("Q4_1", 32, 20),
    Q5_0: Block("Q5_0", 32, 22),
    Q8_0: Block("Q8_0", 32, 34),
    Q4_K: Block("Q4_K", 256, 144),
    Q5_K: Block("Q5_K", 256, 176),
    Q6_K: Block("Q6_K", 256, 210),
    BF16: Block("BF16", 1, 2),
}
"""Those that are read, by ggml's number."""

_OTHERS = {
    7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def name_of(kind: int) -> str:
    """ggml's name of a type."""
    known = BLOCKS.get(kind)
    return known.name if known else _OTHERS.get(kind, f"type {kind}")
