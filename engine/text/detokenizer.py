"""`IncrementalDetokenizer`: a stream of token ids to a stream of whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
#: Unfinished tokens that are waited for; a character has at most four bytes, so more than these
#: can't all belong to one.
MAX_PENDING = 8
CONTEXT_TOKENS = 6


class WindowedDetokenizer:
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
        self._window = [token for token in prompt_token_ids[-64:] if token not in skipped]
        self._shorten()

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
        """The text that the tokens after the read mark add."""
        previous = self._decode(self._window[: self._read])
        return self._decode(self._window)[len(previous) :]

    def _advance(self, text: str) -> str:
        """Mark the window as read and keep only its end as the next context."""
        self._shorten()
        return text

    def _shorten(self) -> None:
        """Keep the window's end. It begins with a whole character: a decoder that gathers bytes
        would take what is left of one for an error, and the characters behind it too.
        """
        start = max(0, len(self._window) - CONTEXT_TOKENS)
        for earlier in range(start, max(-1, start - MAX_PENDING), -1):
            if not self._decode(self._window[earlier:]).startswith(REPLACEMENT):
                start = earlier
                break
        self._window = self._window[start:]
        self._read = len(self._window)

    def flush(self) -> str:
        """Return the remaining text, even if unfinished."""
        return self._advance(self._new_text())


#: Prompt tokens that are looked at: enough to tell whether a text has begun and to finish a
#: character whose first bytes the prompt holds.
DETOKENIZER_CONTEXT_TOKENS = 16


class IncrementalDetokenizer:
    """Text of one output, as its tokens come. Each token costs O(1).

    All that `push` returned, and then `flush`, is what decoding the output in one go after its
    prompt gives. Bytes that can't become a character any more come out as U+FFFD at once.

    Args:
        tokenizer: the model's.
        prompt_token_ids: what stands before the output. A leading space of the output is only
            dropped where the text really begins with it.
        skip_special_tokens: leave special tokens out of the text.
        kept_tokens: special tokens that stay in the text all the same.
        spaces_between_special_tokens: for tokenizers that join tokens with spaces: also between
            two added tokens that follow each other. Others write none anyway.
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
        """Read the prompt's end, so that the output continues where the prompt stops."""
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
        """The text that these tokens complete; "" while a character is unfinished."""
        if self._window is not None:
            return self._window.push(ids)
        visible_ids = (
            [token for token in ids if token not in self._skipped] if self._skipped else ids
        )
        if self._at_start:
            data = self._tokenizer.join_bytes(visible_ids, at_start=True)
            # The first piece may vanish whole, but then the text has begun all the same.
            self._at_start = not any(map(self._tokenizer.token_bytes, visible_ids))
        else:
            data = b"".join(map(self._tokenizer.token_bytes, visible_ids))
        return self._decode(data)

    def flush(self) -> str:
        """The remaining text at the end: U+FFFD for an incomplete character, else ""."""
        if self._window is not None:
            return self._window.flush()
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if text and self._has_prompt_bytes:
            # What the prompt's bytes begin either became a character, or is the prompt's U+FFFD.
            self._has_prompt_bytes = False
            return text.removeprefix(REPLACEMENT)
        return text
