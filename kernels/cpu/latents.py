"""Attention over latents as a struct of addresses; `LatentLayer` describes it."""

from __future__ import annotations

from kernels.compiled_decoder import DecoderShape, LatentLayer
from kernels.cpu import abi as c
from kernels.cpu.library import vector_address
from kernels.cpu.moe import CpuHeadLinears, handle_of
from kernels.layers import PerHeadLinear


def describe_latents(shape: DecoderShape, layer: LatentLayer) -> c.LatentLayer:
    """Return the struct of a layer. Raises ValueError for inconsistent sizes."""
    latent, heads = len(layer.latent_norm), shape.num_heads
    if latent + layer.rotary != shape.head_dim or shape.num_kv_heads != 1:
        raise ValueError(f"a cached token has {latent} values of its latent and {layer.rotary}")
    rest, value_size = layer.into.layers[0].in_features, layer.out_of.layers[0].out_features
    queries = heads * (rest + layer.rotary)
    if (layer.queries is None) != (layer.query_norm is None):
        raise ValueError("queries have a projection from their latent and its norm, or neither")
    first = queries if layer.queries is None else layer.queries.in_features
    width = first + latent + layer.rotary
    return c.LatentLayer(
        inputs=handle_of("inputs", layer.inputs, (shape.hidden_size, width)),
        queries=handle_of("queries", layer.queries, (first, queries)),
        query_norm=vector_address("query_norm", layer.query_norm, first),
        latent_norm=vector_address("latent_norm", layer.latent_norm, latent),
        into=heads_address("into", layer.into, heads, (rest, latent)),
        out_of=heads_address("out_of", layer.out_of, heads, (latent, value_size)),
        latent=latent,
        rotary=layer.rotary,
        rest=rest,
        value_size=value_size,
        eps=layer.eps,
    )


def heads_address(name: str, layer: PerHeadLinear, heads: int, sizes: tuple[int, int]) -> int:
    """Return the address of the heads' table. Raises ValueError for other kernels or sizes."""
    if not isinstance(layer, CpuHeadLinears):
        raise ValueError(f"{name} is no layer of these kernels")
    shapes = {(one.in_features, one.out_features) for one in layer.layers}
    if len(layer.layers) != heads or shapes != {sizes}:
        raise ValueError(f"{name} must map {sizes[0]} to {sizes[1]} values in {heads} heads")
    return layer.address
