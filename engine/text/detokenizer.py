"""`IncrementalDetokenizer`: converts a stream of token ids into complete characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
#: Maximum number of tokens to wait for an incomplete character, which has at most four bytes: more
#: tokens can't all belong to one.
MAX_PENDING = 8
CONTEXT_TOKENS = 6


class WindowedDetokenizer:
    """Decodes a short window of tokens before and after each push, and returns the difference."""

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
        self._window = [token for token in prompt_token_ids[-64:] if token not in skipped]
        self._shorten()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode_window(ids, False)

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
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
        """Return the text that the tokens after the read mark add to those before it."""
        previous = self._decode(self._window[: self._read])
        return self._decode(self._window)[len(previous) :]

    def _advance(self, text: str) -> str:
        """Mark the window as read, and keep only its end as context."""
        self._shorten()
        return text

    def _shorten(self) -> None:
        """Keep the window's end. It must begin with a complete character: decoders that combine
        bytes would replace the rest of one, and the characters after it, by U+FFFD.
        """
        start = max(0, len(self._window) - CONTEXT_TOKENS)
        for earlier in range(start, max(-1, start - MAX_PENDING), -1):
            if not self._decode(self._window[earlier:]).startswith(REPLACEMENT):
                start = earlier
                break
        self._window = self._window[start:]
        self._read = len(self._window)

    def flush(self) -> str:
        """Return the remaining text, even if incomplete."""
        return self._advance(self._new_text())


#: Number of prompt tokens used as context: enough to know whether a text has begun, and to complete
#: a character whose first bytes are in the prompt.
DETOKENIZER_CONTEXT_TOKENS = 16


class IncrementalDetokenizer:
    """Converts one output's tokens to text incrementally, in O(1) per token.

    The concatenated results of `push` and `flush` equal decoding the whole output after its prompt.
    Bytes that can't become a character any more are returned as U+FFFD immediately.

    Args:
        tokenizer: the model's.
        prompt_token_ids: tokens before the output. A leading space of the output is dropped only if
            the text begins with it.
        skip_special_tokens: leave special tokens out of the text.
        preserved_token_ids: special tokens that stay in the text nevertheless.
        spaces_between_special_tokens: for tokenizers that join tokens with spaces: also between
            two adjacent added tokens. Other tokenizers write none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        preserved_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._skipped = special - preserved_token_ids if preserved_token_ids else special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._has_prompt_bytes = False
        self._window: WindowedDetokenizer | None = None
        if tokenizer.byte_rules is None:
            self._window = WindowedDetokenizer(
                tokenizer,
                prompt_token_ids,
                skipped=self._skipped,
                spaces_between=skip_special_tokens or spaces_between_special_tokens,
            )
        else:
            self._prime(prompt_token_ids)

    def _prime(self, prompt: Sequence[int]) -> None:
        """Read the prompt's end, so that the output continues it."""
        tail: list[int] = []
        for token in reversed(prompt):
            if token not in self._skipped:
                tail.append(token)
            if len(tail) == DETOKENIZER_CONTEXT_TOKENS:
                break
        tail.reverse()
        data = self._tokenizer.join_bytes(tail, at_start=False)
        self._at_start = not data
        self._utf8.decode(data)
        self._has_prompt_bytes = bool(self._utf8.getstate()[0])

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; "" while a character is incomplete."""
        if self._window is not None:
            return self._window.push(ids)
        visible_ids = (
            [token for token in ids if token not in self._skipped] if self._skipped else ids
        )
        if self._at_start:
            data = self._tokenizer.join_bytes(visible_ids, at_start=True)
            # The first piece may decode to nothing, but the text has begun nevertheless.
            self._at_start = not any(map(self._tokenizer.token_bytes, visible_ids))
        else:
            data = b"".join(map(self._tokenizer.token_bytes, visible_ids))
        return self._decode(data)

    def flush(self) -> str:
        """Return the remaining text: U+FFFD for an incomplete character, else ""."""
        if self._window is not None:
            return self._window.flush()
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if text and self._has_prompt_bytes:
            # The prompt's bytes either became part of a character, or are the prompt's U+FFFD.
            self._has_prompt_bytes = False
            return text.removeprefix(REPLACEMENT)
        return text
