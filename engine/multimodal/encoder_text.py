"""`EncoderTextProcessor`: a text for an encoder, and the beginning of the decoder's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.inputs import MediaTensors, encode_tensors, media_digest

#: Tensor of a text for an encoder, and its kind of medium.
TOKEN_IDS, TEXT = "token_ids", "text"


@dataclass(frozen=True, slots=True)
class EncoderText:
    """A text for an encoder; see `PreparedMedia`."""

    digest: bytes
    tensors: MediaTensors
    encoded: bytes
    kind: str = TEXT


@dataclass(frozen=True, slots=True)
class EncoderTextProcessor:
    """Prepares prompts of one model.

    Attributes:
        start_ids: what an output begins with.
        max_tokens: of a text.
        vocab_size: of the tokens.
    """

    start_ids: tuple[int, ...]
    max_tokens: int
    vocab_size: int

    def prepare(self, token_ids: Sequence[int]) -> EncoderText:
        """What the encoder reads of a text. Raises `InvalidRequest`."""
        check_encoder_text(token_ids, self.max_tokens, self.vocab_size)
        tensors = {TOKEN_IDS: np.asarray(token_ids, dtype=np.int64)}
        encoded = encode_tensors(tensors)
        return EncoderText(media_digest(TEXT, encoded), tensors, encoded)

    def begin(self, token_ids: Sequence[int] = ()) -> list[int]:
        """The decoder's prompt: these tokens, behind the first of all outputs; (): what an output
        begins with.
        """
        if not token_ids:
            return list(self.start_ids)
        return [*self.start_ids[: token_ids[0] != self.start_ids[0]], *token_ids]


def check_encoder_text(token_ids: Sequence[int], max_tokens: int, vocab_size: int) -> None:
    """Raise `InvalidRequest` for a text that an encoder can't read."""
    if not 1 <= len(token_ids) <= max_tokens:
        raise InvalidRequest(
            f"The encoder's prompt must have from 1 to {max_tokens} tokens; got {len(token_ids)}.",
            param="prompt",
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise InvalidRequest(
            f"Tokens of the encoder's prompt must be in [0, {vocab_size}).", param="prompt"
        )
