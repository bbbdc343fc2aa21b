"""Prepares a model on a GPU: its attention, its forward pass, its graphs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.models.decoder import NativeDecoder
from engine.models.forward_context import AttentionMetadata, StateStep
from engine.models.interface import EngineModel
from engine.models.lora import DeviceHeads
from engine.worker.gpu.graph_dispatcher import (
    BatchDescriptor,
    CUDAGraphDispatcher,
    CUDAGraphMode,
    CUDAGraphRuntimeMode,
    capture_sizes,
    requested_mode,
    resolve_mode,
)
from engine.worker.gpu.graphs import DeviceForward, GraphRecorder, PiecewiseAttention
from engine.worker.gpu.input_buffers import StaticInputBuffers, send, slots_of
from engine.worker.gpu.memory import MemoryMeter, MemoryProfile, graph_bytes
from engine.worker.gpu.model_runner import query_len, tapped
from engine.worker.hidden_states import HiddenStateStore
from kernels import KernelSet
from kernels.attention import GraphSupport, get_backend
from kernels.attention.registry import Forward, LatentForward
from kernels.logit_edits import LogitEdits, PenaltyRows, TokenTable
from kernels.lora import LoraMapping, LoraSlots

MIN_FREE_BYTES = 256 << 20
"""Bytes that must remain free after graphs were captured."""


class DeviceModel(EngineModel, Protocol):
    """A model on a GPU: `NativeDecoder`, and `TransformersModel` once it was moved there.

    Attributes:
        ops: kernels, a set specific to the model: the runner's attention is installed in it.
    """

    ops: KernelSet

    def release_kv(self) -> None:
        """Free the caches."""


def graph_mode(model: DeviceModel, config: EngineConfig) -> CUDAGraphMode:
    """The graph mode of the settings, or the nearest that the model and its attention support."""
    requested = requested_mode(
        config.cudagraph_mode, config.optimization_level, config.enforce_eager
    )
    if not isinstance(model, NativeDecoder):
        return resolve_mode(requested, GraphSupport.NEVER, 1, "bridged models run eagerly")
    obstacle = None
    if any(layer.experts is not None and layer.experts.needs_host_sync for layer in model.weights):
        obstacle = "experts that run one by one wait for the device"
    support = GraphSupport.ALWAYS
    if model.spec.attention_layers:
        support = get_backend(model.ops.attention_backend).graphs
    if model.stateful:
        # Prompts save states at tokens that the host names in each step.
        captures = requested.decode is CUDAGraphRuntimeMode.FULL
        if obstacle is None and captures and support is not GraphSupport.NEVER:
            return CUDAGraphMode.FULL_DECODE_ONLY
        reason = obstacle or "decode steps of models with states are captured as a whole"
        return resolve_mode(requested, GraphSupport.NEVER, 1, reason)
    return resolve_mode(requested, support, query_len(config), obstacle)


def device_forward(
    model: DeviceModel,
    config: EngineConfig,
    token_budget: int,
    table_lengths: Sequence[int],
    make_recorder: Callable[[], GraphRecorder],
    taps: tuple[int, ...] = (),
) -> DeviceForward:
    """The model's forward pass on its GPU; its graphs are still to be captured.

    With `taps` (layers) it is a `ForwardWithAux`.
    """
    device, run = model.ops.device, tapped(model, taps)
    mode = graph_mode(model, config)
    # Replaces what an earlier runner installed before the model slept.
    attention: Forward = model.ops.paged_attention
    latent_attention: LatentForward | None = model.ops.mla_attention
    previous = vars(model.ops).get("paged_attention")
    if isinstance(previous, PiecewiseAttention):
        attention, latent_attention = previous.attention, previous.latent_attention
    eager, slots = mode is CUDAGraphMode.NONE, slots_of(model)
    breaks = PiecewiseAttention(attention, None if eager else make_recorder(), latent_attention)
    # `with_attention_backend` has made the set a copy specific to this model.
    breaks.install(model.ops)
    if eager:
        return DeviceForward(run, device, breaks=breaks, slots=slots)
    requested_sizes = config.cudagraph_capture_sizes
    stateful = model if isinstance(model, NativeDecoder) and model.stateful else None
    length = 1 if stateful is not None else query_len(config)
    sizes = capture_sizes(config.max_num_seqs, token_budget, length, requested_sizes)
    if not sizes:
        raise ConfigError(
            f"cudagraph_capture_sizes: none is within the token budget of {token_budget}.",
            param="cudagraph_capture_sizes",
        )
    return DeviceForward(
        run,
        device,
        CUDAGraphDispatcher(mode, sizes, config.max_num_seqs, length, adapted=slots is not None),
        StaticInputBuffers(max(sizes), config.max_num_seqs, table_lengths, device, slots),
        breaks,
        slots,
        stateful,
    )


def capture(forward: DeviceForward, meter: MemoryMeter, budget_bytes: int | None) -> None:
    """Capture as many graphs as memory allows, the largest first.

    `budget_bytes`: bytes that were reserved for them; None: all free memory.
    """
    initial_bytes = meter.reserved()

    def has_memory() -> bool:
        within = budget_bytes is None or meter.reserved() - initial_bytes < budget_bytes
        return within and meter.device()[0] > MIN_FREE_BYTES

    forward.capture(has_memory)


log = logging.getLogger(__name__)

SAMPLING_COPIES = 4
"""Copies of the logits: raw ones for log probabilities, softmax or sorted parts, masks, a spare."""
PROFILED_GRAPHS = 2


@torch.inference_mode()
def profile(
    model: DeviceModel,
    config: EngineConfig,
    token_budget: int,
    table_lengths: Sequence[int],
    dtype: torch.dtype,
    layout: KVCacheConfig,
    meter: MemoryMeter,
    make_forward: Callable[[], DeviceForward | None],
    taps: tuple[int, ...] = (),
    fill_encoder: Callable[[], Tensor | None] = lambda: None,
) -> MemoryProfile:
    """Run full-size steps on a cache of one block per group, and measure their memory.

    Args:
        table_lengths: each group's, for a sequence of full length: decode kernels need larger
            workspaces for long tables.
        make_forward: the model's forward pass, its graphs still to be captured; None: eager.
        taps: layers whose inputs drafts read.
        fill_encoder: runs the encoder; returns what takes as much memory as its kept outputs.
    """
    run, size = tapped(model, taps), model.spec.hidden_size
    model.allocate_kv(len(layout.groups), config.block_size, dtype, layout)
    meter.begin()
    encoded = fill_encoder()
    for token_ids, batch, reqs in _full_steps(model, config, token_budget, table_lengths):
        hidden = run(token_ids, batch)
        logits = model.logits(hidden[:reqs, :size])
        copies = [torch.empty_like(logits) for _ in range(SAMPLING_COPIES)]
        del hidden, logits, copies
    peak = meter.peak()
    del encoded
    meter.begin()
    graphs = _graphs(make_forward(), meter)
    model.release_kv()
    meter.begin()
    free, total = meter.device()
    return MemoryProfile(total, total - free - meter.reserved(), peak, graphs)


def _full_steps(
    model: DeviceModel, config: EngineConfig, token_budget: int, table_lengths: Sequence[int]
) -> Iterator[tuple[Tensor, AttentionMetadata, int]]:
    """The largest possible batch, and the largest one of decodes."""
    reqs = min(config.max_num_seqs, token_budget)
    slots = slots_of(model)
    inputs = StaticInputBuffers(token_budget, reqs, table_lengths, model.ops.device, slots)
    for tokens in (token_budget, reqs):
        descriptor = BatchDescriptor(tokens, reqs, tokens == reqs, slots is not None)
        token_ids, context = inputs.dummy_inputs(descriptor)
        # No more keys are read than the single block has.
        inputs.seq_lens.fill_(1)
        context.sequence_rows = torch.arange(reqs)  # on the host, for models that carry a state
        _use_first_state(model, context)
        yield token_ids, context, reqs


def _use_first_state(model: DeviceModel, context: AttentionMetadata) -> None:
    """Let all sequences of a harmless batch share the first state, which nobody reads; a prompt's
    is saved too.
    """
    if not isinstance(model, NativeDecoder) or not model.stateful:
        return
    starts = context.query_start_loc.cpu()
    reqs, num_tokens = len(starts) - 1, int(starts[-1])
    saves = [(1, 0)] if num_tokens > reqs else []
    context.states = StateStep(
        blocks=torch.zeros(reqs, dtype=torch.int64),
        copies=[],
        saves=torch.tensor(saves, dtype=torch.int64).view(-1, 2),
    )
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    context.host = dataclasses.replace(context, positions=positions, query_start_loc=starts)


def _graphs(forward: DeviceForward | None, meter: MemoryMeter) -> int:
    """Memory that all graphs will need: captures the largest ones and measures."""
    if forward is None:
        return 0
    costs: list[int] = []
    previous = meter.reserved()

    def has_memory() -> bool:
        nonlocal previous
        if len(costs) == PROFILED_GRAPHS:
            return False
        now = meter.reserved()
        if forward.num_captured:
            costs.append(now - previous)
        previous = now
        return len(costs) < PROFILED_GRAPHS

    num_requested = forward.num_requested
    forward.capture(has_memory, quiet=True)
    if len(costs) < min(PROFILED_GRAPHS, num_requested):
        costs.append(meter.reserved() - previous)
    return graph_bytes(costs, num_requested) + forward.static_bytes


@torch.inference_mode()
def warm_up_kernels(
    model: DeviceModel, config: EngineConfig, token_budget: int, table_lengths: Sequence[int],
    vocab_size: int,
) -> None:  # fmt: skip
    """Run prompts and decode batches of every power of two, and all sampling methods.

    Kernels choose their tiles by the numbers of tokens and sequences, and compile on the first use
    of each, which takes a second or more: no request should wait for that. Lengths need no warm-up,
    as they are no constants of any kernel. Nothing is written to the KV cache. Bridged models,
    which may keep a state, are skipped.
    """
    _warm_up_sampling(model.ops, vocab_size)
    if not isinstance(model, NativeDecoder):
        return
    max_seqs = min(config.max_num_seqs, token_budget)
    slots = slots_of(model)
    inputs = StaticInputBuffers(token_budget, max_seqs, table_lengths, model.ops.device, slots)
    adapted: list[int] = []
    if slots is not None:
        # Adapters of experts choose tiles by the number of rows, like experts.
        mixture = any(layer.experts is not None for layer in model.weights)
        adapted = _powers_of_two(token_budget) if mixture else [1, token_budget]
    for descriptor in _batches(token_budget, max_seqs, query_len(config), adapted):
        token_ids, context = inputs.dummy_inputs(descriptor)
        # The tables contain only the first block.
        inputs.seq_lens.fill_(min(config.block_size, descriptor.num_tokens // descriptor.num_reqs))
        _use_first_state(model, context)
        hidden = model.forward(token_ids, context)[: descriptor.num_reqs]
        model.logits(hidden)
    if slots is not None:
        for rows in {1, max_seqs}:
            some = hidden.new_zeros((rows, hidden.shape[1]))
            model.logits(some, DeviceHeads(rows=_no_rows(slots, rows, some.device)))


@torch.inference_mode()
def warm_up_draft_heads(keeper: HiddenStateStore, token_budget: int) -> None:
    """Run heads for batches of every power of two, for the same reason; nothing is saved."""
    for count in _powers_of_two(token_budget):
        keeper.warm_up(count)


def _no_rows(slots: LoraSlots, count: int, device: torch.device) -> LoraMapping:
    """Adapters of a step of this many tokens, none of which uses one."""
    sent = send(slots.sort([], count, padded=True), device)
    return LoraMapping(*sent)


def _batches(
    token_budget: int, max_seqs: int, length: int, adapted: Sequence[int]
) -> Iterator[BatchDescriptor]:
    """Decodes of 1, 2, 4 ... `max_seqs` sequences, and prompts of 2, 4 ... `token_budget` tokens.

    If drafts are verified, up to `length` tokens per sequence, some sequences have fewer of them
    than others: decodes of 1, 2, 4 ... `length` tokens. Batches of `adapted` tokens also use
    adapters.
    """
    for size in _powers_of_two(max_seqs):
        for tokens_per_seq in _powers_of_two(length):
            if size * tokens_per_seq <= token_budget:
                yield BatchDescriptor(size * tokens_per_seq, size, True)
    for size in _powers_of_two(token_budget)[1:]:
        yield BatchDescriptor(size, 1, False)
    for size in adapted:
        yield BatchDescriptor(size, 1, size == 1, True)


def _powers_of_two(max_value: int) -> list[int]:
    """1, 2, 4 ... and `max_value`."""
    return [*(1 << power for power in range((max_value - 1).bit_length())), max_value]


def _warm_up_sampling(ops: KernelSet, vocab_size: int) -> None:
    """Every method of sampling one row's token."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=ops.device)

    logits = zeros(1, vocab_size, dtype=torch.float32)
    if ops.edits is not None:
        _edit(ops.edits, logits)
    ops.argmax(logits)
    temperature = zeros(1, dtype=torch.float32) + 1.0
    top_k = zeros(1, dtype=torch.int64) + vocab_size
    half = zeros(1, dtype=torch.float64) + 0.5
    ops.sample(logits, temperature, top_k, half, half, half)


def _edit(edits: LogitEdits, logits: Tensor) -> None:
    """Bans, biases, masks, penalties and log probabilities of one row."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=logits.device)

    index = zeros(1, dtype=torch.int64)
    one = zeros(1, dtype=torch.float32) + 1.0
    edits.mask_tokens(logits, index, index)
    edits.add_bias(logits, index, index, one)
    words = zeros(1, -(-logits.shape[1] // 32), dtype=torch.int32)
    for forced in (None, zeros(1, dtype=torch.bool)):
        edits.apply_bitmask(logits, index, words, forced)
    small = zeros(1, dtype=torch.int32)
    table = TokenTable(zeros(1, 256, dtype=torch.int32), zeros(1, 256, dtype=torch.int32))
    edits.update_token_table(table, zeros(4, 1, dtype=torch.int32))
    edits.apply_penalties(logits, PenaltyRows(small, small, one, one, one), table, small)
    edits.token_logprobs(logits, index)
