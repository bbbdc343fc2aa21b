"""Parameters and results of `LLM.beam_search`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.contract.errors import EngineFault, QuireError
from engine.contract.sampling_params import MAX_N, SamplingParams
from engine.contract.validation import check_int
from engine.offline.outputs import CompletionOutput, Logprob, RequestOutput
from engine.text.tokenizer import Tokenizer


class BeamSearchParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=False):
    """Parameters of a beam search. Names and defaults are vLLM's.

    Attributes (range; meaning):
        beam_width: [1, 128]; number of beams, and of outputs.
        max_tokens: >= 1, per output.
        ignore_eos: continue after EOS, so that all outputs have max_tokens.
        temperature: [0, 100]; divides the logits; 0 is the same as 1.
        length_penalty: [-10, 10]; a score is the log probability divided by the length to this
            power.
        early_stopping: True, False or "never", see `SamplingParams`.
        include_stop_str_in_output: include an output's final EOS.

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
        check_int("beam_width", self.beam_width, 1, MAX_N)
        check_int("max_tokens", self.max_tokens, 1)
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """Return the corresponding `SamplingParams`."""
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


@dataclass(slots=True)
class BeamSearchSequence:
    """An output of a search.

    Attributes:
        tokens: prompt and output.
        text: that of prompt and output; None without a tokenizer.
        logprobs: [num output tokens], one per token.
        cum_logprob: their sum, including EOS.
        score: `cum_logprob` divided by the length to the power `length_penalty`.
        finish_reason: "stop" or "length".
        stop_reason: the stop token id that ended the output, if any.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    score: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's outputs by descending score; empty if the search failed with `error`."""

    sequences: list[BeamSearchSequence]
    error: QuireError | None = None


def beams_of(
    result: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    if result.error is not None:
        return BeamSearchOutput([], result.error)
    prompt = result.prompt_token_ids
    try:
        beams = [_beam(prompt, output, params, tokenizer) for output in result.outputs]
    except EngineFault as error:  # the tokenizer can't decode these tokens
        return BeamSearchOutput([], error)
    return BeamSearchOutput(beams)


def _beam(
    prompt: list[int],
    output: CompletionOutput,
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
) -> BeamSearchSequence:
    token_ids, logprobs = output.token_ids, list(output.logprobs or ())
    total = output.cumulative_logprob or 0.0
    score = total / max(1, len(token_ids)) ** params.length_penalty
    if output.finish_reason == "stop" and not params.include_stop_str_in_output:
        token_ids, logprobs = token_ids[:-1], logprobs[:-1]
    tokens = prompt + token_ids
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=logprobs,
        cum_logprob=total,
        score=score,
        text=None if tokenizer is None else tokenizer.decode(tokens),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
