"""Captures a forward pass in CUDA graphs, as a whole or in pieces between attention."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import NativeDecoder
from engine.models.forward_context import AttentionMetadata
from engine.worker.gpu.graph_dispatcher import CUDAGraphDispatcher, CUDAGraphRuntimeMode, Key
from engine.worker.gpu.input_buffers import (
    SampledTokenFeed,
    StagedInputs,
    StaticInputBuffers,
    stage_inputs,
)
from kernels import KernelSet
from kernels.attention.registry import Forward, LatentForward
from kernels.attention_args import AttentionArgs, MlaArgs
from kernels.lora import LoraSlots

Replay = Callable[[], None]


class GraphRecorder(Protocol):
    """Records the device's work between `begin` and `end` without running it."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """Context of one recording, however many pieces it has."""

    def begin(self) -> None:
        """Begin a piece."""

    def end(self) -> Replay:
        """End the piece; returns what replays it."""


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Context without Python's garbage collection; collects once at the start.

    A tensor that is collected while a graph is recorded would be freed into the graph's pool. A
    collection with a loaded model takes a third of a second or more, so there is only one for all
    graphs.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(slots=True)
class RecordedForward:
    """A forward pass: its pieces in order, and where its result is."""

    steps: list[Replay]
    output: Tensor

    def replay(self) -> Tensor:
        """Run it on the current content of the static inputs."""
        for step in self.steps:
            step()
        return self.output


Args = TypeVar("Args", AttentionArgs, MlaArgs)


def _attend(
    attention: Callable[[Args], Tensor], args: Args, batch: AttentionMetadata, count: int,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """Attention of one group's batch of `count` tokens into `out`: first decodes, then the rest."""
    tables, lens, starts = batch.block_tables, batch.seq_lens, batch.query_start_loc
    first = batch.num_decodes

    def part(tokens: slice, sequences: slice, starts: Tensor) -> None:
        batch_args = replace(
            args, q=args.q[tokens], out=out[tokens], block_tables=tables[sequences],
            seq_lens=lens[sequences], query_start_loc=starts,
        )  # fmt: skip
        if isinstance(batch_args, AttentionArgs) and batch_args.visible_ends is not None:
            decodes = first > 0 and tokens.stop == first  # which see no later token
            batch_args.visible_ends = None if decodes else batch_args.visible_ends[tokens]
        attention(batch_args)

    if batch.prefill_start_loc is None:
        part(slice(count), slice(None), starts)
    else:
        part(slice(first), slice(first), starts[: first + 1])
        part(slice(first, count), slice(first, None), batch.prefill_start_loc)
    return out


class PiecewiseAttention:
    """Attention that splits a recording in two, and runs eagerly in between.

    Replaces `KernelSet.paged_attention`, and `latents` replaces `latent_attention`. Eager attention
    gets the step's actual batch, so that a piecewise graph depends on the number of tokens alone.
    If decodes come first in a batch with prompts, they get a separate call: kernels choose their
    tiles, and whether to split the keys, by the majority of a call's sequences.

    Attributes:
        attention, latent_attention: the replaced functions.
        batch: the context of the step that runs or is replayed, on the device.
    """

    def __init__(
        self,
        attention: Forward,
        recorder: GraphRecorder | None = None,
        latent_attention: LatentForward | None = None,
    ) -> None:
        self.attention, self.latent_attention = attention, latent_attention
        self._recorder = recorder
        self._steps: list[Replay] | None = None
        self._static: AttentionMetadata | None = None
        self.batch: AttentionMetadata | None = None

    def install(self, ops: KernelSet) -> None:
        """Replace the attention of a kernel set that belongs to the model."""
        vars(ops)["paged_attention"], vars(ops)["mla_attention"] = self, self.latents

    def __call__(self, args: AttentionArgs) -> Tensor:
        return self._run(self.attention, args)

    def latents(self, args: MlaArgs) -> Tensor:
        if self.latent_attention is None:
            raise RuntimeError("There's no attention over latents to stand for.")
        return self._run(self.latent_attention, args)

    def _run(self, attention: Callable[[Args], Tensor], args: Args) -> Tensor:
        if self._steps is None or self._recorder is None:
            batch = self._split_batch(args.block_tables)
            if batch is not None and args.out is None:
                return _attend(attention, args, batch, len(args.q), args.new_out())
            return attention(args)
        group = self._group_of(args.block_tables)
        # Created while the piece is recorded: its memory belongs to the recording.
        out = args.new_out()
        self._steps.append(self._recorder.end())

        def attend() -> None:
            if self.batch is None:
                raise RuntimeError("A piecewise graph is replayed without a batch.")
            batch = self.batch.groups[group]
            _attend(attention, args, batch, len(batch.positions), out)

        self._steps.append(attend)
        self._recorder.begin()
        return out

    def _split_batch(self, block_tables: Tensor) -> AttentionMetadata | None:
        """The group of the step's batch with this table, if it mixes decodes and other
        sequences.
        """
        if self.batch is None or self.batch.prefill_start_loc is None:
            return None
        return next((g for g in self.batch.groups if g.block_tables is block_tables), None)

    def _group_of(self, block_tables: Tensor) -> int:
        """Index of the recorded context's KV cache group with this table."""
        if self._static is None:
            raise RuntimeError("Nothing is being recorded.")
        tables = [group.block_tables for group in self._static.groups]
        return next(index for index, table in enumerate(tables) if table is block_tables)

    def record(
        self, run: Callable[[Tensor, AttentionMetadata], Tensor], token_ids: Tensor,
        context: AttentionMetadata, *, piecewise: bool,
    ) -> RecordedForward:  # fmt: skip
        """Record `run(token_ids, context)`, whole or in pieces."""
        if self._recorder is None:
            raise RuntimeError("There's nothing to record with.")
        steps: list[Replay] = []
        self.batch = None
        with self._recorder.session():
            self._recorder.begin()
            self._steps, self._static = (steps if piecewise else None), context
            try:
                output = run(token_ids, context)
            finally:
                self._steps = self._static = None
                steps.append(self._recorder.end())
        return RecordedForward(steps, output)


log = logging.getLogger(__name__)

Run = Callable[[Tensor, AttentionMetadata], Tensor]


class DeviceForward:
    """Moves a step's inputs to the device and runs the model, in graphs once they are captured.

    Args:
        run: the model's forward.
        device: the model's device.
        dispatcher, inputs: None without graphs.
        breaks: replaces the model's attention; None: it is called directly.
        slots: of the model's adapters; None: the model itself distinguishes rows of adapters.
        stateful: a model with states; None: it has none, or there are no graphs.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        dispatcher: CUDAGraphDispatcher | None = None,
        inputs: StaticInputBuffers | None = None,
        breaks: PiecewiseAttention | None = None,
        slots: LoraSlots | None = None,
        stateful: NativeDecoder | None = None,
    ) -> None:
        self._run, self._device = run, device
        self._dispatcher, self._inputs, self._breaks = dispatcher, inputs, breaks
        self._slots, self._stateful = slots, stateful
        self._recordings: dict[Key, RecordedForward] = {}

    @property
    def num_requested(self) -> int:
        """Graphs to capture, or captured."""
        return len(self._dispatcher.keys) if self._dispatcher is not None else 0

    @property
    def num_captured(self) -> int:
        """Number of captured graphs."""
        return len(self._recordings)

    @property
    def static_bytes(self) -> int:
        """Bytes of the graphs' input buffers."""
        return self._inputs.nbytes if self._inputs is not None else 0

    @torch.inference_mode()
    def capture(self, has_memory: Callable[[], bool] = lambda: True, *, quiet: bool = False) -> int:
        """Record all graphs, largest first, while `has_memory`; returns their number."""
        dispatcher, inputs, breaks = self._dispatcher, self._inputs, self._breaks
        if dispatcher is None or inputs is None or breaks is None:
            return 0
        skipped_sizes: list[int] = []
        with gc_disabled():
            for key in dispatcher.keys:
                if has_memory():
                    self._recordings[key] = self._record(key, inputs, breaks)
                else:
                    skipped_sizes.append(key[1].num_tokens)
                    dispatcher.drop(key)
        if quiet:
            return len(self._recordings)
        if skipped_sizes:
            log.warning("CUDA graphs: no memory for those of %s tokens", sorted(set(skipped_sizes)))
        log.info("CUDA graphs: %d captured, %s", len(self._recordings), dispatcher.mode.name)
        return len(self._recordings)

    def _record(
        self, key: Key, inputs: StaticInputBuffers, breaks: PiecewiseAttention
    ) -> RecordedForward:
        """Record one graph, with a harmless batch."""
        mode, descriptor = key
        token_ids, context = inputs.dummy_inputs(descriptor)
        if self._stateful is not None:
            context.state_rows = inputs.state_rows[: descriptor.num_reqs]
        # Run eagerly once: kernels must be compiled and workspaces allocated outside of the
        # recording.
        self._run(token_ids, context)
        return breaks.record(
            self._run, token_ids, context, piecewise=mode is CUDAGraphRuntimeMode.PIECEWISE
        )

    def __call__(self, token_ids: Tensor, context: AttentionMetadata) -> Tensor:
        """Hidden states of `context.logits_rows`; the arguments are on the host."""
        return self.run(*self.stage(token_ids, context))

    def stage(
        self,
        token_ids: Tensor,
        context: AttentionMetadata,
        feed: SampledTokenFeed | None = None,
        more: Sequence[np.ndarray] = (),
    ) -> tuple[Key | None, StagedInputs]:
        """Choose a graph, and send the inputs to the device in one copy, without synchronizing."""
        key = self._key(token_ids, context)
        to = None if key is None else key[1]
        size = len(token_ids) if to is None else to.num_tokens
        lora = context.adapters.sorted(self._slots, size, padded=to is not None)
        return key, stage_inputs(token_ids, context, self._device, to, feed, more, lora)

    def run(self, key: Key | None, step: StagedInputs) -> Tensor:
        """Run the staged step; returns the hidden states of the rows whose logits are needed."""
        context, count = step.context, len(step.context.positions)
        if self._breaks is not None:
            self._breaks.batch = context
        if key is None or self._inputs is None:
            return self._run(step.token_ids, context)
        self._inputs.fill(step, key[1])
        states = None if self._stateful is None else self._stateful.states
        if states is not None:
            states.prepare(context)
        hidden = self._recordings[key].replay()
        if states is not None:
            states.finish_step()
        if context.logits_rows is not None:
            return hidden[context.logits_rows]
        return hidden[:count]

    def _key(self, token_ids: Tensor, context: AttentionMetadata) -> Key | None:
        """The recording for the batch; None: there is none."""
        if self._dispatcher is None or context.has_media:
            return None
        if context.states is not None and len(context.states.saves):
            return None  # a graph saves no states
        counts = context.query_start_loc.diff()
        longest = int(counts.max()) if len(counts) else 0
        adapted = self._slots is not None and bool(context.adapters)
        key = self._dispatcher.dispatch(len(token_ids), len(counts), longest, adapted=adapted)
        return key if key in self._recordings else None
