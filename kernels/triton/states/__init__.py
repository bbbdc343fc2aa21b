"""Layers that carry a state; `kernels.ssm` defines the operations.

Tokens of a sequence are taken in one after the other by tiles whose shapes depend on the layer
alone, so a token's bits depend neither on how its prompt was cut nor on its neighbours.
"""

from kernels.triton.states.causal_conv import causal_conv
from kernels.triton.states.diagonal_scan import diagonal_scan
from kernels.triton.states.linear_scan import linear_scan

__all__ = ["causal_conv", "diagonal_scan", "linear_scan"]
