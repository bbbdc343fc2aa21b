"""`SamplingParams`: how to choose tokens. Torch-free; the same struct offline and on the wire.

Names and defaults are vLLM's. Every bad value is refused with the field's name before anything is
allocated. Checks that need the model (vocabulary, context) are in `check_against_model`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.checks import integer, is_unicode, number, token_ids
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.repetition import RepetitionDetectionParams
from engine.structured.params import StructuredOutputsParams
from engine.structured.thinking import ThinkingParams

GREEDY_EPS = 1e-5
MAX_N = 128
MAX_STOP = 64
MAX_STOP_CHARS = 4096
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 4 * MAX_STOP_CHARS
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 65536
MAX_SEED = 2**63 - 1
MAX_LENGTH_PENALTY = 10.0
_FLAGS = (
    "use_beam_search",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class SamplingParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """How to choose the tokens of a request.

    Attributes (range; meaning):
        n: [1, 128]; how many outputs to return.
        best_of: None or [n, 128]; how many to generate, the best n by cumulative log probability
            return. With use_beam_search the beam width.
        presence_penalty, frequency_penalty: [-2, 2]; on tokens of the output so far.
        repetition_penalty: (0, 2]; on tokens of prompt and output, > 1 discourages.
        temperature: [0, 100]; below 1e-5 is greedy.
        top_p: (0, 1]. top_k: -1 or 0 for all, else >= 1. min_p: [0, 1].
        seed: None or [0, 2**63); with a seed the tokens don't depend on the rest of the batch.
        stop: strings that end the output and aren't part of it (see include_stop_str_in_output).
        stop_token_ids: token ids that end the output.
        bad_words: strings (or token-id lists, see bad_words_token_ids) never generated.
        ignore_eos: go on after EOS.
        max_tokens: None (up to the context) or >= 1. min_tokens: >= 0, before EOS or stop ids.
        logprobs: None or [0, max_logprobs]; that many top ones beside the sampled token's.
        prompt_logprobs: the same for prompt tokens.
        detokenize, skip_special_tokens, spaces_between_special_tokens: of the text.
        truncate_prompt_tokens: None or >= 1; keep only the last k prompt tokens. -1: what the
            context holds beside max_tokens.
        use_beam_search: search for the n likeliest outputs with `beam_width` beams instead of
            drawing tokens; seed and the filters don't matter then.
        length_penalty: [-10, 10]; a beam's score is its log probability over its length to this.
        early_stopping: when a search ends that has as many finished outputs as beams. True: at
            once; False: when the best beam, ending now, couldn't better them; "never": when no beam
            could within max_tokens.
        repetition_detection: end an output that repeats itself (finish reason "repetition").
        logit_bias: {token id: [-100, 100]}. allowed_token_ids: only these may be generated.
        structured_outputs: what the output must look like (a schema, a regex, choices, a grammar).
        thinking: how to tell the model's reasoning: `structured_outputs` begin after it, and it may
            have a budget of tokens.
        logits_processors: offline only, callables on (generated ids, logits).

    Raises:
        InvalidRequest: with `param` the field's name.
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
    thinking: ThinkingParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self._check_counts()
        self._check_numbers()
        self._check_stops()
        self._check_token_lists()
        self._check_processors()
        self._check_structured_outputs()
        self._check_repetition_detection()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false.", param=name)
        self._check_beams()

    def _check_counts(self) -> None:
        integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            integer("best_of", self.best_of, 1, MAX_N)
            if self.best_of < self.n:
                raise InvalidRequest(
                    f"best_of ({self.best_of}) must be at least n ({self.n}).", param="best_of"
                )
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1)
        integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not be over max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                integer(name, value, 0)
        if self.truncate_prompt_tokens is not None:
            integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequest(
                    "truncate_prompt_tokens must be -1 or at least 1.",
                    param="truncate_prompt_tokens",
                )
        if self.seed is not None:
            integer("seed", self.seed, 0, MAX_SEED)
        integer("top_k", self.top_k, -1)
        if self.top_k == 0:
            self.top_k = -1

    def _check_numbers(self) -> None:
        number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, low_open=True)
        number("temperature", self.temperature, 0.0, 100.0)
        number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        number("min_p", self.min_p, 0.0, 1.0)

    def _check_stops(self) -> None:
        self._check_strings("stop", MAX_STOP)
        self._check_strings("bad_words", MAX_BAD_WORDS)
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True.", param="stop")

    def _check_strings(self, name: str, limit: int) -> None:
        strings = getattr(self, name)
        if strings is None:
            return
        if not isinstance(strings, list) or len(strings) > limit:
            raise InvalidRequest(f"{name} must be a list of at most {limit} strings.", param=name)
        for text in strings:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"{name} must hold strings of 1 to {MAX_STOP_CHARS} characters.", param=name
                )
            if not is_unicode(text):
                raise InvalidRequest(f"{name} holds a lone surrogate.", param=name)

    def _check_token_lists(self) -> None:
        if self.stop_token_ids is not None:
            token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids must not be empty.", param="allowed_token_ids"
                )
        if self.bad_words_token_ids is not None:
            self._check_bad_word_ids(self.bad_words_token_ids)
        if self.logit_bias is not None:
            self._check_logit_bias(self.logit_bias)

    @staticmethod
    def _check_bad_word_ids(words: Any) -> None:
        name = "bad_words_token_ids"
        # A word given as text may have three spellings in tokens (see engine.text.bad_words).
        if not isinstance(words, list) or len(words) > 3 * MAX_BAD_WORDS:
            raise InvalidRequest(
                f"{name} must be a list of at most {3 * MAX_BAD_WORDS} lists.", param=name
            )
        for word in words:
            token_ids(name, word, MAX_BAD_WORD_TOKENS)
            if not word:
                raise InvalidRequest(f"{name} must not hold an empty list.", param=name)

    @staticmethod
    def _check_logit_bias(biases: Any) -> None:
        if not isinstance(biases, dict) or len(biases) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias must be an object of at most {MAX_LOGIT_BIAS} entries.",
                param="logit_bias",
            )
        for token, bias in biases.items():
            integer("logit_bias", token, 0)
            number("logit_bias", bias, -100.0, 100.0)

    def _check_processors(self) -> None:
        functions = self.logits_processors
        if functions is None:
            return
        if not isinstance(functions, list) or not all(map(callable, functions)):
            raise InvalidRequest(
                "logits_processors must be a list of functions.", param="logits_processors"
            )

    def _check_structured_outputs(self) -> None:
        given = self.structured_outputs
        if given is not None and not isinstance(given, StructuredOutputsParams):
            raise InvalidRequest(
                "structured_outputs must be a StructuredOutputsParams.", param="structured_outputs"
            )
        if self.thinking is not None and not isinstance(self.thinking, ThinkingParams):
            raise InvalidRequest("thinking must be a ThinkingParams.", param="thinking")

    def _check_repetition_detection(self) -> None:
        given = self.repetition_detection
        if given is not None and not isinstance(given, RepetitionDetectionParams):
            raise InvalidRequest(
                "repetition_detection must be a RepetitionDetectionParams.",
                param="repetition_detection",
            )

    def _check_beams(self) -> None:
        number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest(
                'early_stopping must be true, false or "never".', param="early_stopping"
            )
        for name in ("structured_outputs", "thinking"):
            if self.use_beam_search and getattr(self, name) is not None:
                raise InvalidRequest(f"{name} can't be combined with use_beam_search.", param=name)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_EPS

    @property
    def num_sequences(self) -> int:
        """How many outputs the engine sends for this request."""
        return self.n if self.use_beam_search else self.best_of or self.n

    @property
    def num_running(self) -> int:
        """How many sequences run in the engine for this request, at most."""
        return self.beam_width if self.use_beam_search else self.num_sequences

    @property
    def beam_width(self) -> int:
        """How many beams a search keeps."""
        return self.best_of or self.n

    def prompt_limit(self, max_model_len: int) -> int | None:
        """`truncate_prompt_tokens` resolved: the most prompt tokens to keep, None for all."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, max_model_len - (self.max_tokens or 1))

    def check_against_model(
        self, *, vocab_size: int, num_prompt_tokens: int, max_model_len: int, max_logprobs: int
    ) -> None:
        """Raise `InvalidRequest` for what only shows beside a model's vocabulary and context."""
        check_context(num_prompt_tokens, self.max_tokens, max_model_len)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                raise InvalidRequest(
                    f"{name} must be at most {max_logprobs}, got {value}.", param=name
                )
        tokens: list[tuple[str, Any]] = [
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", self.logit_bias),
        ]
        if self.thinking is not None:
            tokens.append(("thinking", self.thinking.all_token_ids))
        tokens += [("bad_words", word) for word in self.bad_words_token_ids or ()]
        for name, ids in tokens:
            if ids and max(ids) >= vocab_size:
                raise InvalidRequest(
                    f"{name} holds token {max(ids)}, but the vocabulary has {vocab_size} entries.",
                    param=name,
                )

    def output_budget(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """The most tokens that may still be generated for a prompt of this length."""
        room = max_model_len - num_prompt_tokens
        return room if self.max_tokens is None else min(self.max_tokens, room)

    def update_from_generation_config(
        self, generation_config: dict[str, Any], model_eos_token_id: int | None = None
    ) -> None:
        """Make the further EOS ids of a `generation_config.json` stop token ids (not with
        `ignore_eos`). The model's own EOS ends an output anyway and isn't listed.
        """
        eos = generation_config.get("eos_token_id")
        if eos is None or self.ignore_eos:
            return
        further = [eos] if isinstance(eos, int) else list(eos)
        listed = dict.fromkeys([*(self.stop_token_ids or ()), *further])
        listed.pop(model_eos_token_id, None)
        token_ids("stop_token_ids", list(listed), MAX_STOP_TOKEN_IDS)
        self.stop_token_ids = list(listed) or None

    def clone(self) -> SamplingParams:
        """A deep copy, except that logits processors are shared."""
        processors = self.logits_processors
        copy = msgspec.convert(
            msgspec.to_builtins(msgspec.structs.replace(self, logits_processors=None)),
            SamplingParams,
            str_keys=True,
        )
        copy.logits_processors = processors
        return copy


def check_context(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> None:
    """Raise `ContextLengthExceeded` unless prompt and output fit, naming both numbers."""
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens, but the model's context is "
            f"{max_model_len} tokens and at least one must be left for the output.",
            param="prompt",
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together "
            f"{num_prompt_tokens + max_tokens}, but the model's context is {max_model_len} tokens.",
            param="max_tokens",
        )
