"""Paged attention, and the merge of attention states, in Triton."""

from kernels.triton.attention.merge import merge_attention_states
from kernels.triton.attention.paged import paged_attention

__all__ = ["merge_attention_states", "paged_attention"]
