"""The attention function that `transformers` calls in place of its own.

`transformers` lets a model's attention modules call a registered function by the name in
`config._attn_implementation`. Ours hands each call to the run that the thread is in: the one that
finds out what a model is made of, or the one that serves a step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

#: Serves steps. `transformers` knows no mask of this name, so it makes none.
PAGED = "quire_paged"
#: Explores a model: the same attention, but the model's masks are asked for.
EXPLORED = "quire_explored"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an attention module.

    Attributes:
        module: which one.
        query: [batch, heads, tokens, size].
        key: [batch, KV heads, tokens, size], of the step's tokens only.
        value: the same; its size may differ.
        mask: what the model made for this layer.
        options: what else the module passed: `scaling`, `softcap`, `s_aux`...
    """

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]


class Run(Protocol):
    """A forward pass."""

    def attend(self, call: Call) -> Tensor:
        """[batch, tokens, heads, size of the values]."""

    def mask(self, **arguments: Any) -> Tensor:
        """The mask for so many queries and keys that `transformers` asks for."""


_thread = threading.local()


@contextmanager
def running(run: Run) -> Iterator[None]:
    """Attention calls of this thread go to `run` meanwhile."""
    before = getattr(_thread, "run", None)
    _thread.run = run
    try:
        yield
    finally:
        _thread.run = before


def _run() -> Run:
    run: Run | None = getattr(_thread, "run", None)
    if run is None:
        raise RuntimeError("an attention module was called outside of the engine")
    return run


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`transformers`' attention interface; it has no use for the second result."""
    return _run().attend(Call(module, query, key, value, attention_mask, options)), None


def _mask(**arguments: Any) -> Tensor:
    """`transformers`' mask interface."""
    return _run().mask(**arguments)


def use_attention(model: torch.nn.Module, name: str) -> None:
    """Set the attention implementation of all of a model's parts."""
    from transformers import PreTrainedConfig

    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            # The setter would hand it to parts that have none of ours.
            config._attn_implementation_internal = name


def register() -> None:
    """Make both names known to `transformers`. Doing it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(EXPLORED, _attend)
    AttentionMaskInterface.register(EXPLORED, _mask)
