"""Paged attention, also over latents, encoder attention, and merging of attention states."""

from kernels.triton.attention.encoder import encoder_attention
from kernels.triton.attention.kernels import merge_attention_states
from kernels.triton.attention.mla import latent_attention
from kernels.triton.attention.paged import paged_attention

__all__ = ["encoder_attention", "latent_attention", "merge_attention_states", "paged_attention"]
