"""`EncoderTextProcessor`: the encoder's and the decoder's prompts of text encoder-decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.inputs import MediaTensors, encode_tensors, media_digest

#: Name of the tensor with an encoder's text, and its kind of media.
TOKEN_IDS, TEXT = "token_ids", "text"


@dataclass(frozen=True, slots=True)
class EncoderText:
    """An encoder's text; for the attributes see `PreparedMedia`."""

    digest: bytes
    tensors: MediaTensors
    encoded: bytes
    kind: str = TEXT


@dataclass(frozen=True, slots=True)
class EncoderTextProcessor:
    """Prepares prompts of a model.

    Attributes:
        start_ids: the first tokens of a decoder's sequence.
        max_tokens: maximum length of an encoder's text.
        vocab_size: size of the encoder's vocabulary.
    """

    start_ids: tuple[int, ...]
    max_tokens: int
    vocab_size: int

    def prepare(self, token_ids: Sequence[int]) -> EncoderText:
        """Prepare a text for the encoder. Raises the errors of `check_encoder_text`."""
        check_encoder_text(token_ids, self.max_tokens, self.vocab_size)
        tensors = {TOKEN_IDS: np.asarray(token_ids, dtype=np.int64)}
        encoded = encode_tensors(tensors)
        return EncoderText(media_digest(TEXT, encoded), tensors, encoded)

    def begin(self, token_ids: Sequence[int] = ()) -> list[int]:
        """Return the decoder's prompt: `start_ids` by default, otherwise these tokens, preceded by
        the first of `start_ids` unless they begin with it.
        """
        if not token_ids:
            return list(self.start_ids)
        return [*self.start_ids[: token_ids[0] != self.start_ids[0]], *token_ids]


def check_encoder_text(token_ids: Sequence[int], max_tokens: int, vocab_size: int) -> None:
    """Raise `InvalidRequest` for an empty or too long text, or tokens outside of the vocabulary."""
    if not 1 <= len(token_ids) <= max_tokens:
        raise InvalidRequest(
            f"The encoder's prompt must have from 1 to {max_tokens} tokens; got {len(token_ids)}.",
            param="prompt",
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise InvalidRequest(
            f"Tokens of the encoder's prompt must be in [0, {vocab_size}).", param="prompt"
        )
