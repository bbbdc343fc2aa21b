"""Layers with a recurrent state; `kernels.ssm` defines the operations.

Tiles take in the tokens of a sequence one after the other, and their shapes depend only on the
layer. So a token's bits depend neither on the chunks of its prompt nor on other sequences.
"""

from kernels.triton.states.causal_conv import causal_conv
from kernels.triton.states.diagonal_scan import diagonal_scan
from kernels.triton.states.linear_scan import linear_scan

__all__ = ["causal_conv", "diagonal_scan", "linear_scan"]
