"""`PoolingParams`: what a request asks of a pooling model. Torch-free.

Names follow vLLM's; `docs/embeddings.md` describes each task's result.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.contract import validation as checks
from engine.contract.errors import ContextLengthExceeded, InvalidRequest
from engine.contract.validation import check_task

Vectors = NDArray[np.float32]


def from_bytes(data: bytes, rows: int | None = None) -> Vectors:
    """A result as the engine returns it: float32 [size], or [rows, size]."""
    values = np.frombuffer(data, dtype="<f4")
    return values if rows is None else values.reshape(rows, -1)


def similarity(kind: str, first: Vectors, second: Vectors) -> float:
    """Similarity of two float32 [size]: larger is more similar; distances are negative.

    `kind` is sentence-transformers' `similarity_fn_name`: "cosine", "dot", "euclidean" or
    "manhattan". Raises `InvalidRequest` for another.
    """
    a, b = first.astype(np.float64), second.astype(np.float64)
    if kind == "cosine":
        norms = float(np.linalg.norm(a) * np.linalg.norm(b))
        return float(a @ b) / norms if norms else 0.0
    if kind == "dot":
        return float(a @ b)
    if kind == "euclidean":
        return -float(np.linalg.norm(a - b))
    if kind == "manhattan":
        return -float(np.abs(a - b).sum())
    raise InvalidRequest(f"The model's similarity {kind!r} isn't known.", param="model")


def score_pairs(num_first: int, num_second: int) -> list[tuple[int, int]]:
    """Pair the first texts with the second ones: one with each, or one by one.

    Raises `InvalidRequest` if the counts are neither 1 to N nor N to N, or 0.
    """
    if num_first < 1 or num_second < 1:
        raise InvalidRequest("Both sides need at least one text.", param="text_2")
    if num_first not in (1, num_second):
        raise InvalidRequest(
            f"{num_first} texts can't be scored against {num_second}: it must be one against "
            "several, or as many on both sides.",
            param="text_2",
        )
    return [(0 if num_first == 1 else index, index) for index in range(num_second)]


EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
EMBED_DTYPES: tuple[EmbedDtype, ...] = get_args(EmbedDtype)
#: Number of mantissa bits, and the exponent's bias.
_FP8 = {"fp8_e4m3": (3, 7), "fp8_e5m2": (2, 15)}


def encode_vector(values: Vectors, dtype: EmbedDtype, endianness: Endianness = "native") -> bytes:
    """The float32 `values` as bytes, each rounded to the nearest number of `dtype`.

    Ties are rounded to even. For e4m3, which has no infinity, larger values saturate.
    """
    numbers = _converted(np.ascontiguousarray(values, dtype=np.float32), dtype)
    if endianness not in ("native", sys.byteorder):
        numbers = numbers.byteswap()
    return numbers.tobytes()


def _converted(values: Vectors, dtype: EmbedDtype) -> NDArray[np.generic]:
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    return _as_bfloat16(values) if dtype == "bfloat16" else _as_fp8(values, *_FP8[dtype])


def _as_bfloat16(values: Vectors) -> NDArray[np.uint16]:
    """The upper half of each float32."""
    bits = values.view(np.uint32)
    upper = (bits >> 16) & 1
    rounded = ((bits + np.uint32(0x7FFF) + upper) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _as_fp8(values: Vectors, mantissa: int, bias: int) -> NDArray[np.uint8]:
    """A magnitude's rank among all of them is its code; 65,536 stands for e5m2's infinity."""
    last = 0x7E if mantissa == 3 else 0x7C
    codes = np.arange(last + 1)
    exponent, fraction = codes >> mantissa, (codes & (2**mantissa - 1)) / 2**mantissa
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    ladder = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)
    middles = (ladder[:-1] + ladder[1:]) / 2
    missing = np.isnan(values)
    magnitude = np.abs(np.where(missing, 0, values).astype(np.float64))
    code = np.searchsorted(middles, magnitude)
    tie = magnitude == middles[np.minimum(code, last - 1)]
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = np.where(missing, 0x7F, code)
    return (code | (np.signbit(values) << 7)).astype(np.uint8)


#: Tasks with one vector per prompt.
SEQUENCE_TASKS = ("embed", "classify", "score")
#: Tasks with one vector per token.
TOKEN_TASKS = ("token_embed", "token_classify")
TASKS = SEQUENCE_TASKS + TOKEN_TASKS
#: For models that attend to audio: when each token of the prompt is spoken.
ALIGN = "align"
GENERATE = "generate"
#: For models that transcribe an audio file.
TRANSCRIPTION = "transcription"


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How to pool a prompt's hidden states. Raises `InvalidRequest` for a value out of range.

    Attributes:
        task: "embed", "classify", "score", "token_embed" or "token_classify"; "" for the model's
            own (`resolved_task`).
        dimensions: keep this many of an embedding's first dimensions (Matryoshka models only).
        use_activation: normalize an embedding, or apply softmax or sigmoid to logits; None: as the
            model's configuration says.
        truncate_prompt_tokens: keep this many of the prompt's first tokens; -1: the model's
            context. Applied when text is tokenized, not by the engine.
        second_segment: the first token of a pair's second part, for models that distinguish the two
            by token types; 0: there is none.
        align_from: with "align", the first token that is aligned.
        num_states: with "align", number of encoder states that cover audio rather than padding.
    """

    task: str = ""
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    second_segment: int = 0
    align_from: int = 0
    num_states: int = 0

    def __post_init__(self) -> None:
        if self.task and self.task not in (*TASKS, ALIGN):
            raise InvalidRequest(
                f"task must be one of {', '.join(TASKS)}; got {checks.format_value(self.task)}.",
                param="task",
            )
        if self.dimensions is not None:
            checks.check_int("dimensions", self.dimensions, 1)
        if self.truncate_prompt_tokens is not None:
            checks.check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequest(
                    "truncate_prompt_tokens must be at least 1, or -1 for the model's context.",
                    param="truncate_prompt_tokens",
                )
        for name in ("second_segment", "align_from", "num_states"):
            checks.check_int(name, getattr(self, name), 0)
        if not isinstance(self.use_activation, bool | None):
            formatted = checks.format_value(self.use_activation)
            raise InvalidRequest(
                f"use_activation must be a boolean, got {formatted}.", param="use_activation"
            )

    @property
    def by_token(self) -> bool:
        """Whether the result has a vector per token."""
        return self.task in (*TOKEN_TASKS, ALIGN)

    def prompt_limit(self, max_model_len: int) -> int | None:
        """Maximum number of tokens of a truncated prompt, or None for no truncation.

        Raises `InvalidRequest` for a limit over the context.
        """
        limit = self.truncate_prompt_tokens
        if limit is None:
            return None
        if limit > max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens ({limit}) is over the model's context of "
                f"{max_model_len} tokens.",
                param="truncate_prompt_tokens",
            )
        return max_model_len if limit == -1 else limit

    def check_against_model(
        self,
        *,
        model: str,
        tasks: Sequence[str],
        embedding_size: int,
        matryoshka: Collection[int] | None,
    ) -> None:
        """Raise `InvalidRequest` for values that this model doesn't support.

        `matryoshka` lists the dimensions that the model was trained for: None if it wasn't, empty
        if any up to `embedding_size` is valid.
        """
        check_task(model, tasks, self.task)
        if self.dimensions is None:
            return
        if self.task not in ("embed", "token_embed"):
            raise InvalidRequest("dimensions is for embeddings alone.", param="dimensions")
        if matryoshka is None:
            raise InvalidRequest(
                f"The model '{model}' has no Matryoshka embeddings: dimensions can't be chosen.",
                param="dimensions",
            )
        if self.dimensions > embedding_size or (matryoshka and self.dimensions not in matryoshka):
            allowed = ", ".join(map(str, sorted(matryoshka))) or f"1 to {embedding_size}"
            raise InvalidRequest(
                f"dimensions must be one of {allowed} for the model '{model}', "
                f"got {self.dimensions}.",
                param="dimensions",
            )


def check_length(num_tokens: int, max_model_len: int) -> None:
    """Raise `ContextLengthExceeded` with both numbers for a prompt longer than the context."""
    if num_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {num_tokens} tokens, but the model takes at most {max_model_len}.",
            param="prompt",
        )


def default_task(tasks: Sequence[str]) -> str:
    """The default task of `encode` and /pooling: the model's main one."""
    return tasks[0] if tasks and tasks[0] in TASKS else TASKS[0]
