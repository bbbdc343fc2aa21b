"""Sampling in Triton: edits of logits, penalties, filters, draws and log probabilities."""

from kernels.logit_edits import LogitEdits
from kernels.triton.sampling import logit_edits
from kernels.triton.sampling.logit_edits import token_logprobs
from kernels.triton.sampling.sample import argmax, sample

__all__ = ["TritonLogitEdits", "argmax", "sample", "token_logprobs"]


class TritonLogitEdits(LogitEdits):
    """`LogitEdits` of a GPU."""

    mask_tokens = staticmethod(logit_edits.forbid)
    add_bias = staticmethod(logit_edits.add)
    apply_bitmask = staticmethod(logit_edits.keep)
    update_token_table = staticmethod(logit_edits.record)
    apply_penalties = staticmethod(logit_edits.penalize)
    token_logprobs = staticmethod(token_logprobs)
