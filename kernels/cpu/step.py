"""`CompiledStep` of the CPU: addresses, bound once for as long as the same sequences decode."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.cpu import structs as c
from kernels.cpu.checks import check_dense
from kernels.cpu.experts import handle_of
from kernels.cpu.library import Library, check
from kernels.cpu.lora import LoraGroups
from kernels.cpu.threads import num_threads
from kernels.lora import TableUse
from kernels.steps import CompiledStep, StepChoice, StepEnds, StepTables


class CpuStep(CompiledStep):
    """Keeps the layers and tensors that it points to.

    Raises ValueError for what doesn't fit together.
    """

    def __init__(
        self,
        library: Library,
        decoder: tuple[int, object],
        hidden_size: int,
        ends: StepEnds,
        tables: StepTables,
    ) -> None:
        """`decoder`: its address, and who keeps it."""
        self._kept = (decoder[1], ends, tables)
        handle = library.step_new(
            ctypes.byref(_ends(decoder[0], hidden_size, ends)), ctypes.byref(_tables(tables))
        )
        if not handle:
            raise MemoryError("no memory for the description of a step")
        self._handle, self._run = handle, library.step_run
        self._vocab_size = ends.head.out_features
        weakref.finalize(self, library.step_free, handle).atexit = False  # as of layers

    def over(
        self,
        rows: Tensor,
        choice: StepChoice | None,
        logits: Tensor | None = None,
        adapters: Sequence[TableUse] = (),
    ) -> Callable[[], list[int]]:
        """See `CompiledStep.over`."""
        count = len(rows)
        check_dense("rows", rows, (count,), torch.int64)
        chosen, open_rows = count, None
        if logits is not None:
            check_dense("logits", logits, (len(logits), self._vocab_size), torch.float32)
            chosen, open_rows = count - len(logits), logits.data_ptr()
        if chosen < 0:
            raise ValueError("logits must have at most as many rows as the step")
        described = None if choice is None else ctypes.byref(_choice(choice, chosen))
        out = (ctypes.c_int64 * chosen)()
        groups = LoraGroups(adapters)
        run, kept = self._run, (self, rows, choice, logits, groups)
        args = (
            self._handle, rows.data_ptr(), count, chosen, described, out, open_rows, groups.table,
            groups.count,
        )  # fmt: skip

        def step(kept: object = kept) -> list[int]:
            if status := run(*args, num_threads()):
                check(status)
            return out[:]

        return step


def _ends(decoder: int, hidden: int, ends: StepEnds) -> c.StepEnds:
    vocab = ends.head.out_features
    learned = ends.positions
    if learned is not None:
        check_dense("positions", learned, (len(learned), hidden), torch.float32)
    if ends.position_offset < 0:
        raise ValueError("position_offset must not be negative")
    return c.StepEnds(
        decoder=decoder,
        embedding=handle_of("embedding", ends.embedding, (hidden, vocab)),
        head=handle_of("head", ends.head, (hidden, vocab)),
        positions=None if learned is None else learned.data_ptr(),
        num_positions=0 if learned is None else len(learned),
        position_offset=ends.position_offset,
        embedding_scale=ends.embedding_scale,
        logit_scale=ends.logit_scale,
    )


def _tables(tables: StepTables) -> c.StepTables:
    rows, longest = tables.tokens.shape
    groups, _, blocks = tables.block_tables.shape
    check_dense("tokens", tables.tokens, (rows, longest), torch.int32)
    check_dense("block_tables", tables.block_tables, (groups, rows, blocks), torch.int32)
    counts = (tables.num_prompt, tables.num_tokens, tables.num_computed)
    for count in counts:
        check_dense("counts", count, (rows,), torch.int64)
    return c.StepTables(
        tokens=tables.tokens.data_ptr(),
        token_stride=longest,
        block_tables=tables.block_tables.data_ptr(),
        num_groups=groups,
        table_stride=blocks,
        num_prompt=tables.num_prompt.data_ptr(),
        num_tokens=tables.num_tokens.data_ptr(),
        num_computed=tables.num_computed.data_ptr(),
        num_rows=rows,
    )


def _choice(choice: StepChoice, count: int) -> c.StepChoice:
    check_dense("temperature", choice.temperature, (count,), torch.float32)
    check_dense("top_k", choice.top_k, (count,), torch.int64)
    check_dense("top_p", choice.top_p, (count,), torch.float64)
    check_dense("min_p", choice.min_p, (count,), torch.float64)
    check_dense("seeds", choice.seeds, (count,), torch.int64)
    return c.StepChoice(
        temperature=choice.temperature.data_ptr(),
        top_k=choice.top_k.data_ptr(),
        top_p=choice.top_p.data_ptr(),
        min_p=choice.min_p.data_ptr(),
        seeds=choice.seeds.data_ptr(),
    )
