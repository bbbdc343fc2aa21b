"""Token counts as clients see them and as the ledger gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Usage:
    """Counts of one request.

    `reasoning_tokens`: of the completion's, those of the reasoning; None for a model without any.
    `numerics_changed`: a replica that computes other bits went on with it in the middle.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    numerics_changed: bool = False

    def without(self, before: Usage) -> Usage:
        """What came behind what was counted before."""
        prompt = max(0, self.prompt_tokens - before.prompt_tokens)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=max(0, self.completion_tokens - before.completion_tokens),
            cached_tokens=min(prompt, self.cached_tokens),
        )

    def as_openai(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage | self.remarks()

    def remarks(self) -> dict[str, Any]:
        """Fields of ours that are there only where they have something to say."""
        return {"numerics_changed": True} if self.numerics_changed else {}
