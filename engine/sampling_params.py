"""Names of `vllm.sampling_params`."""

from engine.contract.sampling_fields import RequestOutputKind
from engine.contract.sampling_params import SamplingParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.offline.beam_search import BeamSearchParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
