"""From logits to tokens: penalties, filters and counter-based randomness. Needs torch."""

from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.request_state import SequenceSampling
from engine.sampling.sampler import Sampler, SamplerOutput

__all__ = [
    "Sampler",
    "SamplerOutput",
    "SequenceSampling",
    "prompt_logprobs",
]
