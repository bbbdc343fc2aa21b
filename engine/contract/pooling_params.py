"""`PoolingParams`: what a request asks of a pooling model. Torch-free.

Names follow vLLM's; see `docs/pooling.md` for what each task gives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from engine.contract import checks
from engine.contract.errors import ContextLengthExceeded, InvalidRequest

#: Tasks with one vector a prompt.
WHOLE_TASKS = ("embed", "classify", "score")
#: Tasks with one vector a token.
TOKEN_TASKS = ("token_embed", "token_classify")
TASKS = WHOLE_TASKS + TOKEN_TASKS
GENERATE = "generate"


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What to make of a prompt's hidden states. Raises `InvalidRequest` for a value out of range.

    Attributes:
        task: "embed", "classify", "score", "token_embed" or "token_classify"; "" for the model's
            own (`resolved_task`).
        dimensions: keep so many of an embedding's first dimensions (Matryoshka models alone).
        use_activation: normalise an embedding, or put logits through softmax or sigmoid; None: as
            the model says.
        truncate_prompt_tokens: keep this many of the prompt's first tokens; -1: the model's
            context. Applied where text becomes tokens, not by the engine.
        second_segment: the first token of a pair's second part, for models that tell the two by
            token types; 0: there is none.
    """

    task: str = ""
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    second_segment: int = 0

    def __post_init__(self) -> None:
        if self.task and self.task not in TASKS:
            raise InvalidRequest(
                f"task must be one of {', '.join(TASKS)}; got {checks.shown(self.task)}.",
                param="task",
            )
        if self.dimensions is not None:
            checks.integer("dimensions", self.dimensions, 1)
        if self.truncate_prompt_tokens is not None:
            checks.integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequest(
                    "truncate_prompt_tokens must be at least 1, or -1 for the model's context.",
                    param="truncate_prompt_tokens",
                )
        checks.integer("second_segment", self.second_segment, 0)
        _boolean("use_activation", self.use_activation)

    @property
    def by_token(self) -> bool:
        """Whether every token has a vector of its own in the result."""
        return self.task in TOKEN_TASKS

    def prompt_limit(self, max_model_len: int) -> int | None:
        """Most tokens that a prompt is cut to, or None for no cutting.

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
        """Raise `InvalidRequest` for what this model can't do.

        `matryoshka` names the dimensions that the model was trained for: None when it wasn't,
        empty when any up to `embedding_size` will do.
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


def check_task(model: str, tasks: Sequence[str], task: str) -> None:
    """Raise `InvalidRequest`, naming what the model does, when `task` isn't among it."""
    if task not in tasks:
        raise InvalidRequest(
            f"The model '{model}' doesn't do '{task}'. It does: {', '.join(tasks)}.",
            param="model",
            code="unsupported_task",
        )


def check_length(num_tokens: int, max_model_len: int) -> None:
    """Raise `ContextLengthExceeded` with both numbers for a prompt over the context."""
    if num_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {num_tokens} tokens, but the model takes at most {max_model_len}.",
            param="prompt",
        )


def default_task(tasks: Sequence[str]) -> str:
    """What `encode` and /pooling do when a request names no task: what the model is for."""
    return tasks[0] if tasks and tasks[0] in TASKS else TASKS[0]


def _boolean(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a boolean, got {checks.shown(value)}.", param=name)
