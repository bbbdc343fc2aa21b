"""`PromptEmbeds`: a prompt as vectors, on its way to a replica."""

from __future__ import annotations

import msgspec

#: Types that vectors may come in -> bytes of a number.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class PromptEmbeds(msgspec.Struct, array_like=True):
    """What stands in for the embeddings of a prompt's tokens.

    Attributes:
        dtype: one of `ITEM_BYTES`. rows, size: [num_prompt_tokens, hidden].
        data: the numbers, row by row, little-endian.
    """

    dtype: str
    rows: int
    size: int
    data: bytes

    @property
    def whole(self) -> bool:
        """Whether `data` is as long as the rest says."""
        return len(self.data) == self.rows * self.size * ITEM_BYTES.get(self.dtype, 0)
