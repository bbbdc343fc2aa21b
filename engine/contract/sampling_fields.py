"""The fields of `SamplingParams` and values derived from them. Torch-free."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from engine.contract.reasoning import ReasoningParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.contract.validation import check_int


class RequestOutputKind(Enum):
    """Content of an offline request's outputs; names and numbers are vLLM's."""

    #: The complete output so far, in every result.
    CUMULATIVE = 0
    #: New content since the previous result.
    DELTA = 1
    #: One result, once the request has finished.
    FINAL_ONLY = 2


MAX_PATTERN = 256


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """End an output that repeats itself.

    It ends once its last tokens are some pattern of `min_pattern_size` to `max_pattern_size` tokens
    for the `min_count`-th time in a row.

    Attributes:
        max_pattern_size: [0, 256]; 0 disables it.
        min_pattern_size: [0, max_pattern_size]; 0 means 1.
        min_count: >= 2, unless disabled.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        name = "repetition_detection"
        check_int(f"{name}.max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN)
        check_int(f"{name}.min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        check_int(f"{name}.min_count", self.min_count, 2 if self.max_pattern_size else 0)

    def is_repeating(self, token_ids: list[int], num_output_tokens: int) -> bool:
        """Whether the output (the last `num_output_tokens` of `token_ids`) ends in a repetition."""
        for size in range(self.min_pattern_size or 1, self.max_pattern_size + 1):
            num_repeated = size * self.min_count
            if num_repeated > num_output_tokens:
                return False
            # Periodic: equal to itself one pattern earlier. The last token alone rules out most.
            if (
                token_ids[-1] == token_ids[-1 - size]
                and token_ids[-num_repeated:-size] == token_ids[-num_repeated + size :]
            ):
                return True
        return False


GREEDY_EPS = 1e-5


class SamplingFields(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """How to choose the tokens of a request.

    Attributes (range; meaning):
        n: [1, 128]; how many outputs to return.
        best_of: None or [n, 128]; how many to generate; the n with the highest cumulative log
            probability are returned. With use_beam_search the beam width.
        presence_penalty, frequency_penalty: [-2, 2]; on tokens of the output so far.
        repetition_penalty: (0, 2]; on tokens of prompt and output, > 1 discourages.
        temperature: [0, 100]; below 1e-5 is greedy.
        top_p: (0, 1]. top_k: -1 or 0 for all, else >= 1. min_p: [0, 1].
        seed: None or [-2**63, 2**63); with a seed the tokens don't depend on the rest of the batch.
            -1 is none; 2**63 is added to any other negative one.
        stop: strings that end the output and aren't part of it (see include_stop_str_in_output).
        stop_token_ids: token ids that end the output.
        bad_words: strings (or token-id lists, see bad_words_token_ids) never generated.
        ignore_eos: continue after EOS.
        max_tokens: None (up to the context) or >= 1, cut to what fits the context after the prompt.
        min_tokens: >= 0, before EOS or stop ids.
        logprobs: None or [0, max_logprobs]; number of top tokens in addition to the sampled one.
        logprob_token_ids: up to 128 tokens whose log probabilities replace the top ones';
            `logprobs`, if set, must be their number.
        prompt_logprobs: the same for prompt tokens.
        flat_logprobs: offline only; both come as `FlatLogprobs`, not as lists of dicts.
        detokenize, skip_special_tokens, spaces_between_special_tokens: how to render the text.
        truncate_prompt_tokens: None or >= 1; keep only the last k prompt tokens. -1: what
            fits the context besides max_tokens.
        use_beam_search: search for the n likeliest outputs with `beam_width` beams instead of
            sampling; seed and the filters are ignored.
        length_penalty: [-10, 10]; a beam's score is its log probability over its length to this.
        early_stopping: when a search ends that has as many finished outputs as beams. True: at
            once; False: when the best beam, ending now, wouldn't score higher; "never": when no
            beam could within max_tokens.
        repetition_detection: end an output that repeats itself (finish reason "repetition").
        logit_bias: {token id: [-100, 100]}. allowed_token_ids: only these may be generated.
        structured_outputs: what the output must look like (a schema, a regex, choices, a grammar).
        thinking: how to recognize the model's reasoning: `structured_outputs` begin after it, and
            it may have a budget of tokens.
        output_kind: offline only, for engines that stream; `LLM` always returns final outputs.
        logits_processors: offline only, callables on (generated ids, logits).
        extra_args: plain data for the engine's logits processors; `vllm_xargs` over HTTP.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Any = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    repetition_detection: RepetitionDetectionParams | None = None
    thinking: ReasoningParams | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_EPS

    @property
    def num_sequences(self) -> int:
        """Number of outputs that the engine sends for this request."""
        return self.n if self.use_beam_search else self.best_of or self.n

    @property
    def num_running(self) -> int:
        """Maximum number of sequences that run in the engine for this request."""
        return self.beam_width if self.use_beam_search else self.num_sequences

    @property
    def beam_width(self) -> int:
        """Number of beams of a beam search."""
        return self.best_of or self.n

    def prompt_limit(self, max_model_len: int) -> int | None:
        """Return the maximum number of prompt tokens to keep, None for all."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, max_model_len - (self.max_tokens or 1))

    def output_budget(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """Return the maximum number of tokens to generate for a prompt of this length."""
        num_free = max_model_len - num_prompt_tokens
        return num_free if self.max_tokens is None else min(self.max_tokens, num_free)
