"""Paged attention, over latents too, and the merge of attention states, in Triton."""

from kernels.triton.attention.kernels import merge_attention_states
from kernels.triton.attention.mla import latent_attention
from kernels.triton.attention.paged import paged_attention

__all__ = ["latent_attention", "merge_attention_states", "paged_attention"]
