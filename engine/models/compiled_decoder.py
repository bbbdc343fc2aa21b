"""All layers in one call, which saves Python's share of a step: a dozen calls a layer.

Families that do something else in a layer, and kernels without such a call, run layer by layer; the
log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.models.decoder_spec import DecoderSpec
from engine.models.forward_context import LayerCache
from engine.models.layers.linear import LayerWeights
from kernels import KernelSet
from kernels.interface import CompiledDecoder, NormWeights
from kernels.layers import ACTIVATIONS

log = logging.getLogger(__name__)


def compile_decoder(
    spec: DecoderSpec,
    ops: KernelSet,
    layers: Sequence[LayerWeights],
    final_norm: NormWeights,
    caches: Sequence[LayerCache],
    group_of: Sequence[int],
) -> CompiledDecoder | None:
    """The layers with the norm after them in one call; None, with the reason in the log: no.

    Args:
        caches: each layer's.
        group_of: each layer's KV cache group.
    """
    reason, compiled = _obstacle(spec, layers), None
    if not reason:
        try:
            compiled = ops.compile_decoder(spec, layers, caches, group_of, final_norm)
            reason = f"{ops.name} kernels have no other way"
        except ValueError as error:
            reason = str(error)
    if compiled is None:
        log.info("%s runs layer by layer: %s", spec.architecture, reason)
    return compiled


def _obstacle(spec: DecoderSpec, layers: Sequence[LayerWeights]) -> str:
    """What the compiled decoder can't do; "": nothing."""
    if spec.activation not in ACTIVATIONS:
        return f"it has the activation {spec.activation}"
    if spec.normed_residual:
        return "its residual is what a norm gave"
    if spec.altup is not None:
        return "its tokens have several hidden states"
    if spec.kv_sources or spec.value_norm:
        return "its layers share keys and values, or norm values"
    if spec.states is not None:
        return "some of its layers carry a state"
    if spec.attends or spec.has_mlp:
        return "some of its layers have attention or an MLP alone"
    if spec.cross is not None:
        return "it attends to an encoder's states"
    if spec.latents is not None:
        return "it attends over latents"
    if spec.attention_output_gate:
        return "its attention has gates"
    if any(layer.residual_mlp is not None for layer in layers) or (
        spec.wiring == "parallel" and spec.moe is not None
    ):
        return "it has experts beside attention"
    norms = [layer.mlp_norm for layer in layers]
    if spec.wiring == "parallel" and any(norm and norm.kind == "none" for norm in norms):
        return "its MLP takes the residual as it is, beside attention"
    return ""
