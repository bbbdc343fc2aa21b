"""Setting a model up on a GPU: memory profile, then graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.kv_cache.layout import KVLayout
from engine.models.decoder import NativeDecoder
from engine.models.fused_experts import fuses_experts
from engine.models.interface import EngineModel
from engine.worker.cuda.dispatcher import BatchDescriptor, Dispatcher, capture_sizes
from engine.worker.cuda.forward import DeviceForward
from engine.worker.cuda.graphs import AttentionBreaks, CudaRecorder, Recorder
from engine.worker.cuda.inputs import StaticInputs
from engine.worker.cuda.memory import DeviceMemory
from engine.worker.cuda.modes import GraphMode, resolve_mode, wanted_mode
from kernels.attention import get_backend

log = logging.getLogger(__name__)

LEFT_FREE = 256 << 20
"""Bytes that capturing graphs leaves to everything else."""


def device_of(model: EngineModel) -> torch.device:
    """Where a model's kernels run."""
    return model.ops.device if isinstance(model, NativeDecoder) else torch.device("cpu")


def graph_mode(model: NativeDecoder, config: EngineConfig) -> GraphMode:
    """The mode of the settings, or the nearest that the model and its attention can do."""
    wanted = wanted_mode(config.cudagraph_mode, config.optimization_level, config.enforce_eager)
    obstacle, quantized = None, model.quantization is not None
    if model.spec.moe is not None and not fuses_experts(model.ops, model.spec, quantized):
        obstacle = "experts that run one by one wait for the device"
    return resolve_mode(wanted, get_backend(model.ops.attention_backend).graphs, 1, obstacle)


@torch.inference_mode()
def profile(
    model: NativeDecoder,
    config: EngineConfig,
    token_budget: int,
    dtype: torch.dtype,
    layout: KVLayout,
) -> DeviceMemory:
    """Run a step of full size on a cache of one block a group, and see what it took."""
    device = model.ops.device
    model.allocate_kv(len(layout.groups), config.block_size, dtype, layout)
    torch.cuda.reset_peak_memory_stats(device)
    reqs = min(config.max_num_seqs, token_budget)
    inputs = StaticInputs(token_budget, reqs, 1, len(layout.groups), device)
    whole = BatchDescriptor(token_budget, reqs, False)
    inputs.rehearse(whole)
    # No more keys are read than the one block has.
    inputs.seq_lens.fill_(1)
    hidden = model.forward(*inputs.views(whole))
    logits = model.logits(hidden[:reqs])
    # Sampling works on a copy, on weights and on their sums.
    room = [torch.empty_like(logits) for _ in range(3)]
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del hidden, logits, room, inputs
    model.kv_caches = []
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    return DeviceMemory(total, total - free - held, peak)


def device_forward(
    model: NativeDecoder,
    config: EngineConfig,
    token_budget: int,
    max_blocks: int,
    groups: int,
    make_recorder: Callable[[], Recorder] = CudaRecorder,
) -> DeviceForward:
    """The model's forward pass on its GPU, with the graphs that the settings ask for captured."""
    device = model.ops.device
    mode = graph_mode(model, config)
    # What was put there for an earlier runner, before the model slept, is replaced.
    breaks = vars(model.ops).get("paged_attention", model.ops.paged_attention)
    attention = breaks.attention if isinstance(breaks, AttentionBreaks) else breaks
    eager = mode is GraphMode.NONE
    breaks = AttentionBreaks(attention, None if eager else make_recorder())
    # `with_backend` made the set a copy of this model's own.
    vars(model.ops)["paged_attention"] = breaks
    if eager:
        return DeviceForward(model.forward, device, breaks=breaks)
    sizes = capture_sizes(config.max_num_seqs, token_budget)
    forward = DeviceForward(
        model.forward,
        device,
        Dispatcher(mode, sizes, config.max_num_seqs),
        StaticInputs(max(sizes), config.max_num_seqs, max_blocks, groups, device),
        breaks,
    )
    forward.capture(lambda: torch.cuda.mem_get_info(device)[0] > LEFT_FREE)
    return forward
