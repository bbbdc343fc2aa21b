"""A native decoder as functions that JAX traces once for each of a few shapes.

S is the number of sequences of a program, Q of tokens of each, W of blocks in a row of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import Tensor

from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from kernels.interface import LinearLayer

#: KV tokens that attention reads at a time.
_TILE_TOKENS = 128
#: Finite, so that a tile in which a token sees nothing leaves no NaN behind.
_UNSEEN = -1e30
#: Of layers that see all tokens.
_NO_WINDOW = (1 << 31) - 1
_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def unsupported_feature(spec: DecoderSpec) -> str:
    """The first thing about an architecture that the functions can't compute; "" for none."""
    features = {
        "layers that carry a state": spec.states is not None,
        "attention over latents": spec.latents is not None,
        "attention to an encoder": spec.cross is not None,
        "a soft cap of scores": bool(spec.attention_soft_cap or spec.logit_soft_cap),
        "block-sparse attention": any(spec.sparse_layers),
        "attention biased by distance": bool(spec.alibi_slopes),
        "attention sinks": spec.sinks,
        "a gate of attention": spec.attention_output_gate,
        "clipped projections": bool(spec.clip_qkv),
        "a norm of all heads together": spec.qk_norm not in ("", "rms_head"),
        "experts": spec.moe is not None,
        "layers without an MLP": not all(spec.has_mlp),
        "an MLP without a gate": not spec.gated,
        "a scale of its MLP": spec.mlp_gate_scale != 1.0 or spec.mlp_output_scale != 1.0,
        "a scale of its residual": spec.residual_scale != 1.0
        or bool(spec.normed_residual)
        or spec.attention_output_scale != 1.0,
        "attention beside the MLP": spec.wiring != "sequential",
        "norms after attention": bool(spec.names.attention_out_norm),
        "norms other than RMSNorm": spec.norm != "rms" or bool(spec.names.embedding_norm),
        "learned positions": spec.num_positions > 0,
        "heads or rotations that differ by layer": bool(spec.layer_kv_heads or spec.layer_ropes),
        "positions in three planes": spec.rope is not None and bool(spec.rope.planes),
        f"the activation {spec.activation}": spec.activation not in _ACTIVATIONS,
    }
    return next((name for name, present in features.items() if present), "")


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a program is traced for, in addition to the shapes of its arguments."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    neox: bool
    activation: str
    embedding_scale: float
    logit_scale: float

    @classmethod
    def from_spec(cls, spec: DecoderSpec) -> StepShape:
        """Of an architecture without an unsupported feature."""
        return cls(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.norm_eps,
            scale=spec.attention_scale or spec.head_dim**-0.5,
            neox=spec.rope_neox,
            activation=spec.activation,
            embedding_scale=spec.embedding_scale,
            logit_scale=spec.logit_scale,
        )


def blocks_per_tile(block_size: int) -> int:
    """Return the number that the length of block table rows is a multiple of."""
    return max(1, _TILE_TOKENS // block_size)


def weights_of(decoder: NativeDecoder) -> dict[str, Any]:
    """A decoder's weights as JAX's arrays; those of layers are stacked, so that a program has one
    layer, whatever the depth.
    """
    spec, layers = decoder.spec, decoder.weights
    attention = [layer.attention for layer in layers]
    mlps = [layer.mlp for layer in layers]
    windows = spec.sliding_windows or (0,) * spec.num_layers
    return {
        "embedding": _array(decoder.embedding.tensors()["weight"]),
        "layers": {
            "attention_norm": _stack([layer.input_norm.weight for layer in layers]),
            "qkv": _stack_linears([layer.qkv for layer in attention]),
            "q_norm": _stack([layer.q_norm for layer in attention]),
            "k_norm": _stack([layer.k_norm for layer in attention]),
            "o": _stack_linears([layer.o for layer in attention]),
            "mlp_norm": _stack([layer.mlp_norm.weight for layer in layers]),
            "up": _stack_linears([mlp.up for mlp in mlps]),
            "down": _stack_linears([mlp.down for mlp in mlps]),
            "window": jnp.array([window or _NO_WINDOW for window in windows], jnp.int32),
        },
        "cos_sin": None if spec.rope is None else _array(attention[0].cos_sin),
        "final_norm": _array(decoder.final_norm.weight),
        "head": _stack_linears([decoder.lm_head]),
    }


def _array(value: Tensor) -> Array:
    """On the same memory, where JAX can have it there."""
    return jnp.from_dlpack(value.detach().contiguous())


def _stack(values: list[Tensor | None]) -> Array | None:
    """The weights that each layer has; None where the layers have none."""
    present = [value for value in values if value is not None]
    return _array(torch.stack(present)) if present else None


def _stack_linears(layers: Sequence[LinearLayer]) -> tuple[Array, Array | None]:
    """Weights [layers, N, K] and biases [layers, N]."""
    tensors = [layer.tensors() for layer in layers]
    weight = _stack([parts["weight"] for parts in tensors])
    return weight, _stack([parts.get("bias") for parts in tensors])


@partial(jax.jit, static_argnames="shape", donate_argnames="caches")
def run_layers(
    shape: StepShape,
    weights: dict[str, Any],
    layout: tuple[Array, Array],
    caches: tuple[Array, Array],
    token_ids: Array,
    positions: Array,
    slots: Array,
    tables: Array,
) -> tuple[Array, tuple[Array, Array]]:
    """Hidden states after the final norm, and the caches with the tokens' keys and values.

    Args:
        layout: by layer, int32 [layers]: its part of the caches, and its KV cache group.
        caches: keys and values, [parts, num_blocks, block_size, Hk, D]. They are overwritten.
        token_ids, positions: int32 [S, Q].
        slots: by KV cache group, int32 [groups, S, Q]: block * block_size + offset; what lies
            beyond the cache is written nowhere.
        tables: by KV cache group, int32 [groups, S, W].

    Returns float32 [S, Q, hidden].
    """
    cos_sin = None if weights["cos_sin"] is None else weights["cos_sin"][positions][:, :, None]

    def run_layer(state: Any, inputs: Any) -> Any:
        x, keys, values = state
        layer, part, group = inputs
        normed = _rms_norm(x, layer["attention_norm"], shape.eps)
        q, k, v = _project(shape, layer, normed, cos_sin)
        keys, values = (
            _write(cache, part, slots[group], new) for cache, new in ((keys, k), (values, v))
        )
        x += _linear(
            _attend(shape, q, (keys, values), part, tables[group], positions, layer["window"]),
            layer["o"],
        )
        up = _linear(_rms_norm(x, layer["mlp_norm"], shape.eps), layer["up"])
        gate, up = jnp.split(up, 2, axis=-1)
        x += _linear(_ACTIVATIONS[shape.activation](gate) * up, layer["down"])
        return (x, keys, values), None

    x = weights["embedding"][token_ids].astype(jnp.float32) * shape.embedding_scale
    (x, *caches), _ = lax.scan(run_layer, (x, *caches), (weights["layers"], *layout))
    return _rms_norm(x, weights["final_norm"], shape.eps), tuple(caches)


@partial(jax.jit, static_argnames="shape")
def compute_logits(shape: StepShape, weights: dict[str, Any], hidden: Array) -> Array:
    """float32 [rows, vocab_size] of hidden states float32 [rows, hidden]."""
    weight, bias = weights["head"]
    return _linear(hidden, (weight[0], None if bias is None else bias[0])) * shape.logit_scale


def _linear(x: Array, layer: tuple[Array, Array | None]) -> Array:
    """In the weights' dtype, with sums in float32."""
    weight, bias = layer
    product = jnp.einsum(
        "...k,nk->...n", x.astype(weight.dtype), weight, preferred_element_type=jnp.float32
    )
    return product if bias is None else product + bias


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _project(
    shape: StepShape, layer: dict[str, Any], x: Array, cos_sin: Array | None
) -> tuple[Array, Array, Array]:
    """Queries [S, Q, Hq, D], keys and values [S, Q, Hk, D], normed and rotated."""
    sizes = [shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim]
    parts = jnp.split(_linear(x, layer["qkv"]), [sizes[0], sum(sizes)], axis=-1)
    q, k, v = (part.reshape(*x.shape[:2], -1, shape.head_dim) for part in parts)
    if layer["q_norm"] is not None:
        q = _rms_norm(q, layer["q_norm"], shape.eps)
        k = _rms_norm(k, layer["k_norm"], shape.eps)
    if cos_sin is not None:
        q, k = (_rotate(part, cos_sin, neox=shape.neox) for part in (q, k))
    return q, k, v


def _rotate(x: Array, cos_sin: Array, *, neox: bool) -> Array:
    """Rotary embedding of x [S, Q, heads, D]; cos_sin [S, Q, 1, rotary_dim]."""
    width = cos_sin.shape[-1]
    cos, sin = jnp.split(cos_sin, 2, axis=-1)
    rotated, rest = x[..., :width], x[..., width:]
    if neox:
        first, second = jnp.split(rotated, 2, axis=-1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    both = first * cos - second * sin, second * cos + first * sin
    turned = jnp.concatenate(both, -1) if neox else jnp.stack(both, -1).reshape(rotated.shape)
    return jnp.concatenate([turned, rest], -1)


def _write(cache: Array, part: Array, slots: Array, new: Array) -> Array:
    rows = new.reshape(-1, *new.shape[2:]).astype(cache.dtype)
    flat = cache.reshape(len(cache), -1, *cache.shape[3:])
    return flat.at[part, slots.reshape(-1)].set(rows, mode="drop").reshape(cache.shape)


def _attend(
    shape: StepShape,
    q: Array,
    caches: tuple[Array, Array],
    part: Array,
    table: Array,
    positions: Array,
    window: Array,
) -> Array:
    """Attention of q [S, Q, Hq, D] tile by tile (Milakov and Gimelshein 2018), [S, Q, Hq * D].

    The number of tiles is data, so that one program serves all lengths.
    """
    num_sequences, num_queries = positions.shape
    heads, size, block_size = shape.num_kv_heads, shape.head_dim, caches[0].shape[2]
    q = q.reshape(num_sequences, num_queries, heads, -1, size)
    num_blocks = blocks_per_tile(block_size)
    tile = num_blocks * block_size

    def visit(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, mixed = state
        blocks = lax.dynamic_slice_in_dim(table, index * num_blocks, num_blocks, axis=1)
        distance = positions[:, :, None] - (index * tile + jnp.arange(tile))
        visible = (distance >= 0) & (distance < window)
        k, v = (
            cache[part, blocks].reshape(num_sequences, tile, heads, size).astype(jnp.float32)
            for cache in caches
        )
        # What another sequence left behind may be NaN, which a weight of 0 doesn't remove.
        v = jnp.where(visible.any(1)[:, :, None, None], v, 0.0)
        scores = jnp.einsum("sqhgd,sthd->shgqt", q, k) * shape.scale
        scores = jnp.where(visible[:, None, None], scores, _UNSEEN)
        new_best = jnp.maximum(best, scores.max(-1, keepdims=True))
        weights, decay = jnp.exp(scores - new_best), jnp.exp(best - new_best)
        mixed = mixed * decay + jnp.einsum("shgqt,sthd->shgqd", weights, v)
        return new_best, total * decay + weights.sum(-1, keepdims=True), mixed

    first = jnp.maximum(positions.min() - window + 1, 0) // tile
    best = jnp.full((num_sequences, heads, q.shape[3], num_queries, 1), _UNSEEN, jnp.float32)
    state = best, jnp.zeros_like(best), jnp.zeros((*best.shape[:-1], size), jnp.float32)
    _, total, mixed = lax.fori_loop(first, positions.max() // tile + 1, visit, state)
    return (mixed / total).transpose(0, 3, 1, 2, 4).reshape(num_sequences, num_queries, -1)
