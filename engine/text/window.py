"""Streaming decode for tokenizers whose pieces can't be decoded one by one, like WordPiece."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
#: Unfinished tokens that are waited for; a character has at most four bytes, so more than these
#: can't all belong to one.
MAX_PENDING = 8
CONTEXT_TOKENS = 6


class WindowDecoder:
    """Decodes a short window of tokens before and after each push and returns the difference."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skipped: frozenset[int],
        spaces_between: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._spaces_between = spaces_between
        self._last_added = False
        kept = [token for token in prompt_token_ids[-64:] if token not in skipped]
        self._window = kept[-CONTEXT_TOKENS:]
        self._read = len(self._window)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode_window(ids, False)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return "".join(map(self._push_one, ids))

    def _push_one(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._window.append(token)
        added = token in self._tokenizer.added_tokens
        if added and self._last_added and not self._spaces_between:
            return self._advance(self._tokenizer.added_tokens[token])
        self._last_added = added
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._window) - self._read < MAX_PENDING:
            return ""
        return self._advance(text) if text else ""

    def _new_text(self) -> str:
        """What the tokens after the read mark add to those before it."""
        before = self._decode(self._window[: self._read])
        return self._decode(self._window)[len(before) :]

    def _advance(self, text: str) -> str:
        """Count the window as read and keep only its end as the next context."""
        self._window = self._window[-CONTEXT_TOKENS:]
        self._read = len(self._window)
        return text

    def flush(self) -> str:
        """The rest, finished or not."""
        return self._advance(self._new_text())
