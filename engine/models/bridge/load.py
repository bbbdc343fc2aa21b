"""From a model of `transformers` to a `BridgeModel`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.contract.errors import ModelLoadError
from engine.models.bridge.check import prove
from engine.models.bridge.explore import Exploration, NotPageable
from engine.models.bridge.interface import EXPLORED, PAGED, register, running, use_attention
from engine.models.bridge.linear import pack
from engine.models.bridge.model import BridgeModel
from engine.models.bridge.paged import PagedLayer
from engine.models.bridge.source import Source
from engine.models.bridge.spec import BridgeSpec
from engine.models.bridge.states import unknown_layers
from engine.quantization.scheme import Scheme
from kernels import KernelSet

_EXPLORED_TOKENS = 8
_CHOOSING = ("sparse", "indexed", "compressed")
#: What a model raises that isn't called as it expects.
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)


def load_bridge(
    source: Source,
    spec: BridgeSpec,
    ops: KernelSet,
    dtype: torch.dtype,
    max_model_len: int,
    progress: Callable[[int, int], None],
    scheme: Scheme = Scheme(),  # noqa: B008
) -> BridgeModel:
    """Load, explore and prove a model.

    Raises `ModelLoadError` with the reason when the paged cache can't serve it.
    """
    register()
    progress(0, 2)
    model = source.model(dtype)
    progress(1, 2)
    try:
        bridged = bridge(model, spec, ops, max_model_len, scheme)
    except NotPageable as error:
        raise ModelLoadError(
            f"{type(model).__name__} can't run over the paged KV cache: {error}.", param="model"
        ) from error
    except _FAILURES as error:
        raise ModelLoadError(
            f"{type(model).__name__} can't run over the paged KV cache: its forward pass fails: "
            f"{type(error).__name__}: {error}",
            param="model",
        ) from error
    progress(2, 2)
    return bridged


def bridge(
    model: nn.Module,
    spec: BridgeSpec,
    ops: KernelSet,
    max_model_len: int,
    scheme: Scheme = Scheme(),  # noqa: B008
) -> BridgeModel:
    """Turn a model's attention over to the paged kernels.

    Raises `NotPageable`, and whatever a model raises that can't run so.
    """
    num_parameters = sum(tensor.numel() for tensor in model.parameters())
    decode_bytes = pack(model, ops, scheme)
    _freeze_rope(model, max_model_len)
    bridged = BridgeModel(model, spec, ops, decode_bytes)
    bridged.stateful = _is_stateful(bridged)
    bridged.layers, state_size = _explore(bridged, max_model_len)
    bridged.spec = _completed(bridged, num_parameters, state_size)
    use_attention(model, PAGED)
    prove(bridged)
    bridged.adapted.settle()
    return bridged


def without_windows(bridged: BridgeModel) -> None:
    """Let every layer attend to everything."""
    for layer in bridged.layers:
        layer.window = 0
    bridged.spec = dataclasses.replace(bridged.spec, windows=(0,) * len(bridged.spec.windows))


def _is_stateful(bridged: BridgeModel) -> bool:
    """Whether sequences carry a state; NotPageable if it isn't where the bridge can keep it."""
    for kind in getattr(bridged.model.config, "layer_types", None) or ():
        # Over a few tokens they choose all of them, so that exploring wouldn't tell.
        if any(word in kind for word in _CHOOSING):
            raise NotPageable(f"its {kind} layers choose the tokens that they attend to")
    declared = bool(getattr(bridged.model, "_is_stateful", False))
    cache = bridged.new_cache()
    if unknown := unknown_layers(cache):
        kinds = ", ".join(sorted(unknown))
        raise NotPageable(f"it keeps {kinds} beside keys and values")
    stateful = any(True for _ in cache.linear_layers)
    if declared and not (stateful and bridged.cache_argument):
        raise NotPageable("it keeps its state in a way of its own")
    return stateful


@torch.inference_mode()
def _explore(bridged: BridgeModel, max_model_len: int) -> tuple[list[PagedLayer], int]:
    """The attention calls of one pass over a few tokens, and the elements of its state."""
    model, run = bridged.model, Exploration(max_model_len)
    use_attention(model, EXPLORED)
    ids = torch.arange(_EXPLORED_TOKENS)[None]
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": bridged.stateful}
    cache = bridged.new_cache()
    if bridged.stateful:
        arguments[bridged.cache_argument] = cache
    with running(run):
        model(**arguments)
    if not run.layers and not bridged.stateful:
        raise NotPageable("its attention doesn't go through transformers' attention interface")
    return run.layers, cache.num_elements


def _completed(bridged: BridgeModel, num_parameters: int, state_size: int) -> BridgeSpec:
    """The spec with what exploring has found."""
    layers = bridged.layers
    shapes = {(layer.num_kv_heads, layer.size) for layer in layers}
    return dataclasses.replace(
        bridged.spec,
        architecture=type(bridged.model).__name__,
        num_layers=len(layers),
        kv_sizes=tuple(2 * layer.num_kv_heads * layer.size for layer in layers),
        windows=tuple(layer.window for layer in layers) if len(shapes) == 1 else (),
        state_size=state_size,
        num_parameters=num_parameters,
    )


def _freeze_rope(model: nn.Module, max_model_len: int) -> None:
    """Choose scalings that depend on the longest position once: a cached key must not change."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _moves(kinds):
            _at_end(module, max_model_len)
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for name, kind in kinds.items():
                if _moves(kind):
                    _at_end(module, max_model_len, layer_type=name)
                    kinds[name] = "default"


def _moves(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _at_end(module: nn.Module, max_model_len: int, **arguments: str) -> None:
    with torch.no_grad():
        module(torch.zeros(1), torch.tensor([[max_model_len - 1]]), **arguments)
