"""What a model takes of a GPU's memory beside its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.contract.config import EngineConfig
from engine.kv_cache.layout import KVLayout
from engine.models.context import AttentionContext
from engine.worker.cuda.dispatcher import BatchDescriptor
from engine.worker.cuda.drafted import tapped
from engine.worker.cuda.forward import DeviceForward
from engine.worker.cuda.inputs import StaticInputs
from engine.worker.cuda.lora_rows import slots_of
from engine.worker.cuda.memory import DeviceMemory, Meter, graph_bytes
from engine.worker.cuda.setup import DeviceModel

log = logging.getLogger(__name__)

SAMPLING_COPIES = 4
"""Of the logits: raw ones for log probabilities, their softmax or sorted pieces, masks, a spare."""
PROFILED_GRAPHS = 2


@torch.inference_mode()
def profile(
    model: DeviceModel,
    config: EngineConfig,
    token_budget: int,
    max_blocks: int,
    dtype: torch.dtype,
    layout: KVLayout,
    meter: Meter,
    make_forward: Callable[[], DeviceForward | None],
    taps: tuple[int, ...] = (),
) -> DeviceMemory:
    """Run steps of full size on a cache of one block a group, and see what they took.

    Args:
        max_blocks: of a sequence of full length: decode kernels need more room for long tables.
        make_forward: the model's forward pass, its graphs still to be captured; None: eager.
        taps: layers whose inputs drafts read.
    """
    groups, run, size = len(layout.groups), tapped(model, taps), model.spec.hidden_size
    model.allocate_kv(groups, config.block_size, dtype, layout)
    meter.begin()
    for token_ids, batch, reqs in _full_steps(model, config, token_budget, max_blocks, groups):
        hidden = run(token_ids, batch)
        logits = model.logits(hidden[:reqs, :size])
        copies = [torch.empty_like(logits) for _ in range(SAMPLING_COPIES)]
        del hidden, logits, copies
    peak = meter.peak()
    meter.begin()
    graphs = _graphs(make_forward(), meter)
    model.release_kv()
    meter.begin()
    free, total = meter.device()
    return DeviceMemory(total, total - free - meter.held(), peak, graphs)


def _full_steps(
    model: DeviceModel, config: EngineConfig, token_budget: int, max_blocks: int, groups: int
) -> Iterator[tuple[Tensor, AttentionContext, int]]:
    """The largest batch there can be, and the largest one of decodes."""
    reqs = min(config.max_num_seqs, token_budget)
    slots = slots_of(model)
    inputs = StaticInputs(token_budget, reqs, max_blocks, groups, model.ops.device, slots)
    for tokens in (token_budget, reqs):
        descriptor = BatchDescriptor(tokens, reqs, tokens == reqs, slots is not None)
        token_ids, context = inputs.rehearse(descriptor)
        # No more keys are read than the one block has.
        inputs.seq_lens.fill_(1)
        context.sequence_rows = torch.arange(reqs)  # on the host, for models that carry a state
        yield token_ids, context, reqs


def _graphs(forward: DeviceForward | None, meter: Meter) -> int:
    """What all graphs will take: the largest are captured to see."""
    if forward is None:
        return 0
    costs: list[int] = []
    before = meter.held()

    def has_room() -> bool:
        nonlocal before
        if len(costs) == PROFILED_GRAPHS:
            return False
        now = meter.held()
        if forward.num_captured:
            costs.append(now - before)
        before = now
        return len(costs) < PROFILED_GRAPHS

    wanted = forward.num_wanted
    forward.capture(has_room, quiet=True)
    if len(costs) < min(PROFILED_GRAPHS, wanted):
        costs.append(meter.held() - before)
    return graph_bytes(costs, wanted) + forward.static_bytes
