"""Sampling: logits to tokens with penalties, filters and counter-based randomness. Needs torch."""

from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import Sampler, SamplerOutput

__all__ = [
    "RequestSamplingState",
    "Sampler",
    "SamplerOutput",
    "prompt_logprobs",
]
