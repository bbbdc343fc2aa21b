"""Vectors that came in a message, as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.contract.prompt_embeds import PromptEmbeds

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def tensor_of(embeds: PromptEmbeds) -> Tensor:
    """[rows, size], with memory of its own. Raises `InvalidRequest` unless all of it is there."""
    if not embeds.whole or not embeds.rows or not embeds.size:
        raise InvalidRequest("prompt_embeds aren't whole.", param="prompt_embeds")
    numbers = torch.frombuffer(bytearray(embeds.data), dtype=_DTYPES[embeds.dtype])
    return numbers.view(embeds.rows, embeds.size)
