"""Choosing tokens in Triton: edits of logits, penalties, filters, draws, log probabilities."""

from kernels.logits import LogitEdits
from kernels.triton.sampling import edits, penalties
from kernels.triton.sampling.logprobs import token_logprobs
from kernels.triton.sampling.sample import argmax, sample

__all__ = ["TritonLogitEdits", "argmax", "sample", "token_logprobs"]


class TritonLogitEdits(LogitEdits):
    """`LogitEdits` of a GPU."""

    forbid = staticmethod(edits.forbid)
    add = staticmethod(edits.add)
    keep = staticmethod(edits.keep)
    record = staticmethod(penalties.record)
    penalise = staticmethod(penalties.penalise)
    token_logprobs = staticmethod(token_logprobs)
