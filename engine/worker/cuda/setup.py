"""Setting a model up on a GPU: its attention, its forward pass, its graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative import SpeculativeConfig
from engine.models.decoder import NativeDecoder
from engine.models.interface import EngineModel
from engine.models.taps import TappedForward
from engine.worker.cuda.dispatcher import Dispatcher, capture_sizes
from engine.worker.cuda.forward import DeviceForward, Run
from engine.worker.cuda.graphs import AttentionBreaks, CudaRecorder, Recorder
from engine.worker.cuda.inputs import StaticInputs
from engine.worker.cuda.memory import Meter
from engine.worker.cuda.modes import GraphMode, resolve_mode, wanted_mode
from kernels import KernelSet
from kernels.attention import GraphSupport, get_backend
from kernels.attention.backend import Forward, LatentForward
from kernels.lora_slots import LoraSlots

LEFT_FREE = 256 << 20
"""Bytes that capturing graphs leaves to everything else."""


class DeviceModel(EngineModel, Protocol):
    """A model that runs on a GPU: `NativeDecoder`, and `BridgeModel` once it was moved there.

    Attributes:
        ops: kernels, a set of the model's own: the runner's attention is put into it.
    """

    ops: KernelSet

    def release_kv(self) -> None:
        """Let the caches go."""


def graph_mode(model: DeviceModel, config: EngineConfig) -> GraphMode:
    """The mode of the settings, or the nearest that the model and its attention can do."""
    wanted = wanted_mode(config.cudagraph_mode, config.optimization_level, config.enforce_eager)
    if not isinstance(model, NativeDecoder):
        return resolve_mode(wanted, GraphSupport.NEVER, 1, "bridged models run eagerly")
    obstacle = None
    if any(layer.experts is not None and layer.experts.waits for layer in model.weights):
        obstacle = "experts that run one by one wait for the device"
    support = get_backend(model.ops.attention_backend).graphs
    return resolve_mode(wanted, support, query_len(config), obstacle)


def slots_of(model: DeviceModel) -> LoraSlots | None:
    """Of the model's adapters; None: it has none."""
    return model.lora_slots if isinstance(model, NativeDecoder) else None


def query_len(config: EngineConfig) -> int:
    """Tokens of a sequence whose drafts a step checks; 1 where there are none.

    Steps that are planned ahead check no drafts.
    """
    if not config.speculative_config or config.plans_ahead(True):
        return 1
    return 1 + SpeculativeConfig.from_mapping(config.speculative_config).num_speculative_tokens


def draft_settings(config: EngineConfig, token_budget: int) -> EngineConfig:
    """Those by which a draft model's steps are recorded, beside a model with `config`.

    It checks no drafts: a draft is a decode of one token a sequence, and where it reads what the
    model said since, sequences have different numbers. Of the operator's sizes it has those that
    its budget of tokens allows, and no graphs where that is none.
    """
    sizes = config.cudagraph_capture_sizes
    if sizes is not None:
        sizes = [size for size in sizes if size <= token_budget]
    eager = config.enforce_eager or sizes == []
    return replace(
        config, speculative_config=None, cudagraph_capture_sizes=sizes or None, enforce_eager=eager
    )


def tapped(model: DeviceModel, taps: tuple[int, ...]) -> Run:
    """The model's forward pass, with what drafts read of these layers beside it."""
    return TappedForward(cast(NativeDecoder, model), taps) if taps else model.forward


def device_forward(
    model: DeviceModel,
    config: EngineConfig,
    token_budget: int,
    max_blocks: int,
    groups: int,
    make_recorder: Callable[[], Recorder] = CudaRecorder,
    taps: tuple[int, ...] = (),
) -> DeviceForward:
    """The model's forward pass on its GPU; the graphs that the settings ask for aren't captured.

    With `taps`, layers, it is a `TappedForward`.
    """
    device, run = model.ops.device, tapped(model, taps)
    mode = graph_mode(model, config)
    # What was put there for an earlier runner, before the model slept, is replaced.
    attention: Forward = model.ops.paged_attention
    latent_attention: LatentForward | None = model.ops.latent_attention
    before = vars(model.ops).get("paged_attention")
    if isinstance(before, AttentionBreaks):
        attention, latent_attention = before.attention, before.latent_attention
    eager, slots = mode is GraphMode.NONE, slots_of(model)
    breaks = AttentionBreaks(attention, None if eager else make_recorder(), latent_attention)
    # `with_backend` made the set a copy of this model's own.
    breaks.put_into(model.ops)
    if eager:
        return DeviceForward(run, device, breaks=breaks, slots=slots)
    wanted = config.cudagraph_capture_sizes
    length = query_len(config)
    sizes = capture_sizes(config.max_num_seqs, token_budget, length, wanted)
    if not sizes:
        raise ConfigError(
            f"cudagraph_capture_sizes: none is within the token budget of {token_budget}.",
            param="cudagraph_capture_sizes",
        )
    return DeviceForward(
        run,
        device,
        Dispatcher(mode, sizes, config.max_num_seqs, length, adapted=slots is not None),
        StaticInputs(max(sizes), config.max_num_seqs, max_blocks, groups, device, slots),
        breaks,
        slots,
    )


def capture(forward: DeviceForward, meter: Meter, kept: int | None) -> None:
    """Capture as many graphs as there is memory for, the largest first.

    `kept`: bytes that were kept for them; None: whatever the device has.
    """
    begun = meter.held()

    def has_room() -> bool:
        within = kept is None or meter.held() - begun < kept
        return within and meter.device()[0] > LEFT_FREE

    forward.capture(has_room)
