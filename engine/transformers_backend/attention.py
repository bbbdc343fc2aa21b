"""The attention function that `transformers` calls instead of its own.

A model's attention modules call the registered function named in `config._attn_implementation`.
Ours passes each call to the thread's current handler: one that explores the model, or one that
executes a step.
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
    """Return a mask function's sliding window in tokens, including the token itself; 0 for none.

    Whole rows of a context of `length` tokens are evaluated, so that a window (or a chunk) that no
    context exceeds counts as full attention. Raises ValueError for a mask that is neither causal
    attention nor a sliding window.
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
    """Return which keys a query attends to, bool [length]."""
    zero, keys = torch.tensor(0), torch.arange(length)
    return torch.as_tensor(mask(zero, zero, torch.tensor(query), keys)).expand(length)


# A sequence's state of state-space layers, linear attention and short convolutions.
#
# `transformers` keeps it in the `LinearAttentionLayer`s of its cache. Each sequence has such a
# cache; for decode steps of several sequences their states are gathered into a batch.


#: Cache layers with keys and values only (or nothing), and cache layers with states.
_STATELESS = (caches.DynamicLayer, caches.DynamicSlidingWindowLayer, caches.DummyLayer)
_LINEAR = (
    caches.LinearAttentionLayer,
    caches.LinearAttentionAndFullAttentionLayer,
    caches.LinearAttentionAndSlidingWindowAttentionLayer,
)


class StateCache(DynamicCache):
    """A cache without keys and values: attention gets only those of the current step.

    Attributes:
        num_tokens: the number of tokens that the sequence has computed.
    """

    num_tokens = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the step's keys and values unchanged."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before this step's."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (number of tokens in a mask, the first of them)."""
        return self.num_tokens + query_length, 0

    @property
    def linear_layers(self) -> Iterator[tuple[int, Any]]:
        """Return (index, layer) of the layers with a state."""
        return (
            (index, layer) for index, layer in enumerate(self.layers) if isinstance(layer, _LINEAR)
        )

    @property
    def num_elements(self) -> int:
        """Return the number of elements of all states."""
        return sum(tensor.numel() for _, layer in self.linear_layers for tensor in _states(layer))


def unknown_layers(cache: StateCache) -> set[str]:
    """Return the kinds of cache layers that the bridge doesn't support."""
    supported = (*_STATELESS, *_LINEAR)
    return {type(layer).__name__ for layer in cache.layers if type(layer) not in supported}


def gather(parts: list[StateCache], batch: StateCache) -> StateCache:
    """Fill `batch`, a new cache, with the states of `parts` as rows, and return it."""
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
    """Copy each row of the batch's states to its part."""
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


#: For steps. `transformers` makes no masks for it because none is registered under this name.
PAGED = "quire_paged"
#: For exploring a model: the same attention, but with the model's masks.
EXPLORED = "quire_explored"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of an attention module.

    Attributes:
        module: the attention module.
        query: [batch, heads, tokens, size].
        key: [batch, KV heads, tokens, size], of the step's tokens only.
        value: the same; its size may differ.
        mask: the model's mask for this layer.
        options: the module's other arguments, such as `scaling`, `softcap` and `s_aux`.
    """

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]


class AttentionHandler(Protocol):
    """Handles the attention calls of a forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return [batch, tokens, heads, size of the values]."""

    def mask(self, **arguments: Any) -> Tensor:
        """Return the mask that `transformers` requests for these numbers of queries and keys."""


_thread = threading.local()


@contextmanager
def use_handler(run: AttentionHandler) -> Iterator[None]:
    """Pass this thread's attention calls to `run` in this context."""
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
    """Implement `transformers`' attention interface; the second result is unused."""
    return _run().attend(AttentionCall(module, query, key, value, attention_mask, options)), None


def _mask(**arguments: Any) -> Tensor:
    """Implement `transformers`' mask interface."""
    return _run().mask(**arguments)


def use_attention(model: torch.nn.Module, name: str) -> None:
    """Set the attention implementation of all of a model's parts."""
    from transformers import PreTrainedConfig

    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            # The property's setter would also set it for parts that don't support ours.
            config._attn_implementation_internal = name


def register() -> None:
    """Register both names with `transformers`. Repeated calls change nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(EXPLORED, _attend)
    AttentionMaskInterface.register(EXPLORED, _mask)


@dataclass(slots=True)
class PagedLayer:
    """An attention call of a forward pass: its caches and its window.

    A module that is called twice (a block shared by layers) has two of these.

    Attributes:
        num_heads, num_kv_heads: numbers of query heads and of key/value heads.
        head_dim: size of queries and keys. value_dim: size of values.
        window: tokens that a token attends to, including itself; 0 for all before it.
        group: index of its KV cache group.
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
        """Size of a head in the cache: the shorter of keys and values is padded with zeros."""
        return max(self.head_dim, self.value_dim)


class PagedAttentionHandler:
    """A forward pass whose attention calls use the paged caches, in the order of the layers."""

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
        """Never called: `transformers` makes no masks for the name that steps use."""
        raise RuntimeError("a mask was asked for while serving")

    def finish(self) -> None:
        """Raise RuntimeError unless each layer was called exactly once."""
        if self._next != len(self._layers):
            raise RuntimeError(
                f"{self._next} attention calls in a forward pass instead of {len(self._layers)}"
            )


def _cache_dtype(cache: Tensor, ops: KernelSet) -> torch.dtype:
    """Return the dtype of attention's inputs: that of activations for a cache of this dtype."""
    return ops.activation_dtype(cache.dtype if cache.dtype.itemsize > 1 else torch.bfloat16)


def _by_token(x: Tensor, size: int) -> Tensor:
    """[batch, heads, tokens, n] as float32 [batch * tokens, heads, size], dense."""
    x = x.transpose(1, 2).flatten(0, 1).float()
    if x.shape[-1] < size:
        x = pad(x, (0, size - x.shape[-1]))
    return x.contiguous()
