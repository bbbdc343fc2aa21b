"""From logits to tokens: penalties, filters and counter-based randomness. Needs torch."""

from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import Sampler, SamplerOutput
from engine.sampling.state import SequenceSampling

__all__ = [
    "Sampler",
    "SamplerOutput",
    "SequenceSampling",
    "prompt_logprobs",
]
