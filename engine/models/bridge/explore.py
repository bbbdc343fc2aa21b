"""What a model's forward pass asks of attention: how often, with which heads, seeing what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.models.bridge.interface import Call
from engine.models.bridge.masks import window_of
from engine.models.bridge.paged import PagedLayer

#: What attention modules pass to change the scores, and the paged kernels don't do.
_UNKNOWN = ("position_bias", "indices", "block_indices", "sinks", "bias", "attn_bias")

#: Numbers of masks: far enough apart that a mask to which something was added isn't another one.
_FIRST, _APART = 2, 7


class NotPageable(Exception):
    """Why a model's attention can't run over the paged cache: the message, without its subject."""


class Exploration:
    """A run that writes down what each attention call is like; its results mean nothing.

    Args:
        max_model_len: for which contexts windows are found.
    """

    def __init__(self, max_model_len: int) -> None:
        self.layers: list[PagedLayer] = []
        self._max_model_len = max_model_len
        self._masks: list[int | str] = []

    def attend(self, call: Call) -> Tensor:
        """See `Run`."""
        query, key, value = call.query, call.key, call.value
        for name in _UNKNOWN:
            if call.options.get(name) is not None:
                raise NotPageable(f"its attention needs {name!r}, which the paged kernels lack")
        if not key.shape[2] == query.shape[2] == value.shape[2]:
            raise NotPageable("its attention looks at other tokens than those of the text")
        self.layers.append(
            PagedLayer(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                value_dim=value.shape[3],
                window=self._window(call),
            )
        )
        return (
            value.repeat_interleave(query.shape[1] // value.shape[1], 1)
            .transpose(1, 2)
            .contiguous()
        )

    def mask(self, **arguments: Any) -> Tensor:
        """A mask that says which one it is: full of its number.

        None is 1, which a mask is that became bool.
        """
        try:
            found: int | str = window_of(arguments["mask_function"], self._max_model_len)
        except ValueError as error:
            found = str(error)
        self._masks.append(found)
        shape = (1, 1, arguments["q_length"], arguments["kv_length"])
        return torch.full(shape, float(_FIRST + _APART * (len(self._masks) - 1)))

    def _window(self, call: Call) -> int:
        """The window of the mask that the layer was given."""
        mask = call.mask
        if mask is None:
            causal = call.options.get("is_causal")
            if not (getattr(call.module, "is_causal", True) if causal is None else causal):
                raise NotPageable("its attention isn't causal")
            return 0
        place, rest = divmod(float(mask.flatten()[0]) - _FIRST, _APART)
        known = not rest and 0 <= place < len(self._masks)
        if not known or not bool((mask == mask.flatten()[0]).all()):
            raise NotPageable("it makes attention masks of its own")
        found = self._masks[int(place)]
        if isinstance(found, str):
            raise NotPageable(found)
        return found
