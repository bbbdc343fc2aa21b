"""Choosing tokens on the device: penalties, filters, draws and log probabilities."""

from kernels.triton.sampling.logprobs import token_logprobs
from kernels.triton.sampling.penalties import penalise
from kernels.triton.sampling.sample import argmax, sample

__all__ = ["argmax", "penalise", "sample", "token_logprobs"]
