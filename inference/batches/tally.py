"""Counting a batch's results."""

from __future__ import annotations

from typing import Any


class Tally:
    """Attributes: completed, failed: requests; expired: those that failed by never running; usage:
    tokens, summed over all answers.
    """

    def __init__(self) -> None:
        self.completed = self.failed = self.expired = 0
        self.usage: dict[str, int] = {}

    def note(self, line: dict[str, Any]) -> None:
        """Add a line of a journal."""
        response = line.get("response") or {}
        if response.get("status_code") != 200:
            self.failed += 1
            self.expired += line.get("response") is None
            return
        self.completed += 1
        usage = response.get("body", {}).get("usage") or {}
        # Chat and embeddings say prompt and completion, Responses says input and output.
        self._add("input", usage.get("prompt_tokens", usage.get("input_tokens")))
        self._add("output", usage.get("completion_tokens", usage.get("output_tokens")))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self._add("cached", details.get("cached_tokens"))
        read = usage.get("cache_read_input_tokens")  # Messages leaves it out of the input
        self._add("input", read)
        self._add("cached", read)
        made = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        self._add("reasoning", made.get("reasoning_tokens"))

    def _add(self, name: str, count: Any) -> None:
        self.usage[name] = self.usage.get(name, 0) + int(count or 0)

    def counts(self) -> dict[str, Any]:
        """As `storage.actions.note_progress` takes them."""
        return {
            "completed": self.completed,
            "failed": self.failed,
            "expired": self.expired,
            "usage": self.usage,
        }
