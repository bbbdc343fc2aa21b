"""The attention function that `transformers` calls in place of its own.

`transformers` lets a model's attention modules call a registered function by the name in
`config._attn_implementation`. Ours hands each call to the run that the thread is in: the one that
finds out what a model is made of, or the one that serves a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers import cache_utils as caches

from engine.models.forward_context import AttentionMetadata
from kernels import KernelSet
from kernels.attention_args import AttentionArgs

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def window_of(mask: MaskFunction, length: int) -> int:
    """The window (a token itself included) that a mask function leaves open, 0 for all before.

    The function is asked for whole rows of a context of `length` tokens, so that a window (or a
    chunk) that no context outgrows is full attention. Raises ValueError for a mask that is neither
    causal attention nor a sliding window.
    """
    last = _row(mask, length - 1, length)
    window = int(last.sum())
    for query in sorted({0, 1, length // 3, length // 2, length - 2, length - 1}):
        if not 0 <= query < length:
            continue
        keys = torch.arange(length)
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(_row(mask, query, length), expected):
            raise ValueError("its attention mask is neither causal nor a sliding window")
    return 0 if window == length else window


def _row(mask: MaskFunction, query: int, length: int) -> Tensor:
    """bool [length]: which keys a query sees."""
    zero, keys = torch.tensor(0), torch.arange(length)
    return torch.as_tensor(mask(zero, zero, torch.tensor(query), keys)).expand(length)


# The state that a sequence keeps beside keys and values: of state-space layers, linear attention
# and short convolutions.
#
# `transformers` keeps it in its cache's `LinearAttentionLayer`s. A sequence has such a cache of its
# own; decode steps of several sequences run as one batch, whose states are theirs put together.


#: Layers with keys and values only or nothing at all, and layers with states.
_STATELESS = (caches.DynamicLayer, caches.DynamicSlidingWindowLayer, caches.DummyLayer)
_LINEAR = (
    caches.LinearAttentionLayer,
    caches.LinearAttentionAndFullAttentionLayer,
    caches.LinearAttentionAndSlidingWindowAttentionLayer,
)


class StateCache(DynamicCache):
    """A cache whose keys and values are kept elsewhere: attention gets those of the step alone.

    Attributes:
        num_tokens: how many tokens the sequence has computed.
    """

    num_tokens = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The step's keys and values as they are."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this step's."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(tokens that a mask covers, the first of them)."""
        return self.num_tokens + query_length, 0

    @property
    def linear_layers(self) -> Iterator[tuple[int, Any]]:
        """(index, layer) of the layers that carry a state."""
        return (
            (index, layer) for index, layer in enumerate(self.layers) if isinstance(layer, _LINEAR)
        )

    @property
    def num_elements(self) -> int:
        """Elements of all states."""
        return sum(tensor.numel() for _, layer in self.linear_layers for tensor in _states(layer))


def unknown_layers(cache: StateCache) -> set[str]:
    """Kinds of layers that keep something which the bridge doesn't know."""
    supported = (*_STATELESS, *_LINEAR)
    return {type(layer).__name__ for layer in cache.layers if type(layer) not in supported}


def gather(parts: list[StateCache], batch: StateCache) -> StateCache:
    """`batch`, a new cache, with the states of `parts` as its rows."""
    for index, layer in batch.linear_layers:
        rows: list[Any] = [part.layers[index] for part in parts]
        layer.device, layer.dtype = rows[0].device, rows[0].dtype
        for name in ("conv_kernel_size", "has_previous_state"):
            setattr(layer, name, dict(getattr(rows[0], name)))
        for name in ("conv_states", "recurrent_states"):
            setattr(layer, name, {s: _join(rows, name, s) for s in range(layer.number_of_states)})
            initialized = f"is_{name}_initialized"
            setattr(layer, initialized, dict(getattr(rows[0], initialized)))
    return batch


def scatter(batch: StateCache, parts: list[StateCache]) -> None:
    """Give each of `parts` its row of the batch's states."""
    for layer_index, layer in batch.linear_layers:
        for name in ("conv_states", "recurrent_states"):
            for index, tensor in getattr(layer, name).items():
                if tensor is not None:
                    for row, part in enumerate(parts):
                        getattr(part.layers[layer_index], name)[index] = tensor[row : row + 1]


def _join(rows: list[Any], name: str, index: int) -> Tensor | None:
    tensors = [getattr(row, name)[index] for row in rows]
    return None if tensors[0] is None else torch.cat(tensors)


def _states(layer: Any) -> list[Tensor]:
    both = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [tensor for tensor in both if tensor is not None]


#: Serves steps. `transformers` knows no mask of this name, so it makes none.
PAGED = "quire_paged"
#: Explores a model: the same attention, but the model's masks are asked for.
EXPLORED = "quire_explored"


@dataclass(frozen=True, slots=True)
class AttentionCall:
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


class AttentionHandler(Protocol):
    """A forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """[batch, tokens, heads, size of the values]."""

    def mask(self, **arguments: Any) -> Tensor:
        """The mask that `transformers` requests for these numbers of queries and keys."""


_thread = threading.local()


@contextmanager
def use_handler(run: AttentionHandler) -> Iterator[None]:
    """Attention calls of this thread go to `run` meanwhile."""
    previous = getattr(_thread, "run", None)
    _thread.run = run
    try:
        yield
    finally:
        _thread.run = previous


def _run() -> AttentionHandler:
    run: AttentionHandler | None = getattr(_thread, "run", None)
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
    return _run().attend(AttentionCall(module, query, key, value, attention_mask, options)), None


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


@dataclass(slots=True)
class PagedLayer:
    """One attention call of a forward pass: what it keeps and what it sees.

    A module that is called twice (a block that layers share) makes two of these.

    Attributes:
        num_heads, num_kv_heads: of queries, of keys and values.
        head_dim: of queries and keys; value_dim: of values.
        window: tokens that a token sees, itself included; 0: all before it.
        group: its KV cache group.
        caches: keys and values, [num_blocks, num_kv_heads, block_size, size] each.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    group: int = 0
    caches: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """Of a head in the cache: the shorter of keys and values is padded with zeros."""
        return max(self.head_dim, self.value_dim)


class PagedAttentionHandler:
    """A forward pass whose attention calls write to and read from the caches, in their order."""

    def __init__(
        self, layers: list[PagedLayer], context: AttentionMetadata, ops: KernelSet
    ) -> None:
        self._layers, self._groups, self._ops = layers, context.groups, ops
        self._next = 0

    def attend(self, call: AttentionCall) -> Tensor:
        """See `AttentionHandler`."""
        layer = self._layers[self._next]
        self._next += 1
        if layer.caches is None:
            raise RuntimeError("the KV cache isn't allocated")
        context, caches = self._groups[layer.group], layer.caches
        batch, heads, tokens, size = call.query.shape
        options = call.options
        ops = self._ops
        cache_dtype = _cache_dtype(caches[0], ops)
        parts = (call.query, call.key, call.value)
        q, k, v = (_by_token(part, layer.size).to(cache_dtype) for part in parts)
        ops.rope_and_cache(q, k, v, context.positions, None, *caches, context.slot_mapping)
        sinks = options.get("s_aux")
        out = ops.paged_attention(
            AttentionArgs(
                q,
                *caches,
                context.block_tables,
                context.seq_lens,
                context.query_start_loc,
                float(options.get("scaling") or size**-0.5),
                sliding_window=layer.window,
                soft_cap=float(options.get("softcap") or 0.0),
                sinks=None if sinks is None else sinks.float().contiguous(),
            )
        )
        return out.float().view(batch, tokens, heads, layer.size)[..., : layer.value_dim]

    def mask(self, **arguments: Any) -> Tensor:
        """Never asked for: `transformers` makes no masks for the name that steps run under."""
        raise RuntimeError("a mask was asked for while serving")

    def finish(self) -> None:
        """Raise RuntimeError unless each layer was called once."""
        if self._next != len(self._layers):
            raise RuntimeError(
                f"{self._next} attention calls in a forward pass instead of {len(self._layers)}"
            )


def _cache_dtype(cache: Tensor, ops: KernelSet) -> torch.dtype:
    """In which dtype attention is given its inputs: the activations' for a cache of this dtype."""
    return ops.activation_dtype(cache.dtype if cache.dtype.itemsize > 1 else torch.bfloat16)


def _by_token(x: Tensor, size: int) -> Tensor:
    """[batch, heads, tokens, n] as float32 [batch * tokens, heads, size], dense."""
    x = x.transpose(1, 2).flatten(0, 1).float()
    if x.shape[-1] < size:
        x = pad(x, (0, size - x.shape[-1]))
    return x.contiguous()
