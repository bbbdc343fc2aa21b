"""`BeamSearchParams`: a beam search offline. Torch-free."""

from __future__ import annotations

import msgspec

from engine.contract.checks import integer
from engine.contract.sampling_params import MAX_N, SamplingParams


class BeamSearchParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=False):
    """What to search for. Names and defaults are vLLM's.

    Attributes (range; meaning):
        beam_width: [1, 128]; how many beams are kept, and how many outputs come.
        max_tokens: >= 1, of an output.
        ignore_eos: go on after EOS; all outputs have max_tokens then.
        temperature: [0, 100]; divides the logits. 0, as 1: they are the model's own.
        length_penalty: [-10, 10]; a score is the log probability over the length to this.
        early_stopping: True, False or "never", see `SamplingParams`.
        include_stop_str_in_output: keep the EOS that ended an output.

    Raises:
        InvalidRequest: with `param` the field's name.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        integer("beam_width", self.beam_width, 1, MAX_N)
        integer("max_tokens", self.max_tokens, 1)
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The same as the engine takes it."""
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
        )
