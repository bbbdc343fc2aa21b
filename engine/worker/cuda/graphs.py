"""Recording a forward pass in CUDA graphs, whole or in the pieces between attention."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.models.context import AttentionContext
from kernels import KernelSet
from kernels.attention.args import AttentionArgs, LatentArgs
from kernels.attention.backend import Forward, LatentForward

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records what the device is given between `begin` and `end`, without running it."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """Around one recording, however many pieces it has."""

    def begin(self) -> None:
        """Start a piece."""

    def end(self) -> Replay:
        """End it; what runs it again."""


class CudaRecorder:
    """`Recorder` by CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See `Recorder.session`."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self) -> None:
        """See `Recorder.begin`."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        """See `Recorder.end`."""
        if self._graph is None:
            raise RuntimeError("No graph is being captured.")
        graph, self._graph = self._graph, None
        graph.capture_end()
        return graph.replay


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Within it, Python collects no garbage; what there is goes first.

    A tensor that the collector found while a graph is recorded would be freed into its pool. One
    collection with a model loaded takes a third of a second or more, so that there is one for all
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
class Recording:
    """A forward pass: its pieces in order, and where its result is."""

    steps: list[Replay]
    output: Tensor

    def replay(self) -> Tensor:
        """Run it on what the static inputs hold now."""
        for step in self.steps:
            step()
        return self.output


Args = TypeVar("Args", AttentionArgs, LatentArgs)


def _attend(
    attention: Callable[[Args], Tensor], args: Args, batch: AttentionContext, count: int,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """Attention of one group's batch of `count` tokens into `out`: decodes, then the rest."""
    tables, lens, starts = batch.block_tables, batch.seq_lens, batch.query_start_loc

    def part(tokens: slice, sequences: slice, starts: Tensor) -> None:
        attention(
            replace(
                args, q=args.q[tokens], out=out[tokens], block_tables=tables[sequences],
                seq_lens=lens[sequences], query_start_loc=starts,
            )
        )  # fmt: skip

    first = batch.num_decodes
    if batch.prefill_start_loc is None:
        part(slice(count), slice(None), starts)
    else:
        part(slice(first), slice(first), starts[: first + 1])
        part(slice(first, count), slice(first, None), batch.prefill_start_loc)
    return out


class AttentionBreaks:
    """Attention that cuts a recording in two around itself, and runs in between, eagerly.

    Stands in the place of `KernelSet.paged_attention`, and `latents` in that of `latent_attention`.
    Eager attention gets the step's own batch, so that a piecewise graph depends on the number of
    tokens alone. Where sequences that decode come first in a batch of prompts, they are attended to
    by a call of their own: kernels choose their tiles, and whether to split the keys, by what most
    of a call's sequences do.

    Attributes:
        attention, latent_attention: what it stands for.
        batch: the context of the step that runs or is replayed, on the device.
    """

    def __init__(
        self,
        attention: Forward,
        recorder: Recorder | None = None,
        latent_attention: LatentForward | None = None,
    ) -> None:
        self.attention, self.latent_attention = attention, latent_attention
        self._recorder = recorder
        self._steps: list[Replay] | None = None
        self._static: AttentionContext | None = None
        self.batch: AttentionContext | None = None

    def put_into(self, ops: KernelSet) -> None:
        """Stand for the attention of a set that is a model's own."""
        vars(ops)["paged_attention"], vars(ops)["latent_attention"] = self, self.latents

    def __call__(self, args: AttentionArgs) -> Tensor:
        """See `KernelSet.paged_attention`."""
        return self._run(self.attention, args)

    def latents(self, args: LatentArgs) -> Tensor:
        """See `KernelSet.latent_attention`."""
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
        # Made while the piece is recorded: the memory stays the recording's.
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

    def _split_batch(self, block_tables: Tensor) -> AttentionContext | None:
        """The group of the step's batch with this table, if it has decodes and something else."""
        if self.batch is None or self.batch.prefill_start_loc is None:
            return None
        return next((g for g in self.batch.groups if g.block_tables is block_tables), None)

    def _group_of(self, block_tables: Tensor) -> int:
        """Which KV cache group of the recorded context the table is of."""
        if self._static is None:
            raise RuntimeError("Nothing is being recorded.")
        tables = [group.block_tables for group in self._static.groups]
        return next(at for at, table in enumerate(tables) if table is block_tables)

    def record(
        self, run: Callable[[Tensor, AttentionContext], Tensor], token_ids: Tensor,
        context: AttentionContext, *, piecewise: bool,
    ) -> Recording:  # fmt: skip
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
        return Recording(steps, output)
