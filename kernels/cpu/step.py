"""`CompiledStep` of the CPU: addresses, bound once for as long as the same sequences decode."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.checks import check_dense
from kernels.cpu.experts import handle_of
from kernels.cpu.library import Library, check
from kernels.cpu.threads import num_threads
from kernels.steps import CompiledStep, StepChoice, StepEnds, StepTables

L, F, P = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Ends(ctypes.Structure):
    """`StepEnds` of step.cpp."""

    _fields_ = [
        *((name, P) for name in ("decoder", "embedding", "head", "positions")),
        *((name, L) for name in ("num_positions", "position_offset")),
        *((name, F) for name in ("embedding_scale", "logit_scale")),
    ]


class _Tables(ctypes.Structure):
    """`StepTables` of step.cpp."""

    _fields_ = [
        ("tokens", P),
        ("token_stride", L),
        ("block_tables", P),
        *((name, L) for name in ("num_groups", "table_stride")),
        *((name, P) for name in ("num_prompt", "num_tokens", "num_computed")),
        ("num_rows", L),
    ]


class _Choice(ctypes.Structure):
    """`StepChoice` of step.cpp."""

    _fields_ = [(name, P) for name in ("temperature", "top_k", "top_p", "min_p", "seeds")]


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
        weakref.finalize(self, library.step_free, handle).atexit = False  # as of layers

    def over(self, rows: Tensor, choice: StepChoice | None) -> Callable[[], list[int]]:
        """See `CompiledStep.over`."""
        count = len(rows)
        check_dense("rows", rows, (count,), torch.int64)
        described = None if choice is None else ctypes.byref(_choice(choice, count))
        out = (ctypes.c_int64 * count)()
        run, kept = self._run, (self, rows, choice)
        args = (self._handle, rows.data_ptr(), count, described, out)

        def step(kept: object = kept) -> list[int]:
            if status := run(*args, num_threads()):
                check(status)
            return out[:]

        return step


def _ends(decoder: int, hidden: int, ends: StepEnds) -> _Ends:
    vocab = ends.head.out_features
    learned = ends.positions
    if learned is not None:
        check_dense("positions", learned, (len(learned), hidden), torch.float32)
    if ends.position_offset < 0:
        raise ValueError("position_offset must not be negative")
    return _Ends(
        decoder,
        handle_of("embedding", ends.embedding, (hidden, vocab)),
        handle_of("head", ends.head, (hidden, vocab)),
        None if learned is None else learned.data_ptr(),
        0 if learned is None else len(learned),
        ends.position_offset, ends.embedding_scale, ends.logit_scale,
    )  # fmt: skip


def _tables(tables: StepTables) -> _Tables:
    rows, longest = tables.tokens.shape
    groups, _, blocks = tables.block_tables.shape
    check_dense("tokens", tables.tokens, (rows, longest), torch.int32)
    check_dense("block_tables", tables.block_tables, (groups, rows, blocks), torch.int32)
    counts = (tables.num_prompt, tables.num_tokens, tables.num_computed)
    for count in counts:
        check_dense("counts", count, (rows,), torch.int64)
    return _Tables(
        tables.tokens.data_ptr(), longest, tables.block_tables.data_ptr(), groups, blocks,
        *(count.data_ptr() for count in counts), rows,
    )  # fmt: skip


def _choice(choice: StepChoice, count: int) -> _Choice:
    check_dense("temperature", choice.temperature, (count,), torch.float32)
    check_dense("top_k", choice.top_k, (count,), torch.int64)
    check_dense("top_p", choice.top_p, (count,), torch.float64)
    check_dense("min_p", choice.min_p, (count,), torch.float64)
    check_dense("seeds", choice.seeds, (count,), torch.int64)
    return _Choice(
        choice.temperature.data_ptr(), choice.top_k.data_ptr(), choice.top_p.data_ptr(),
        choice.min_p.data_ptr(), choice.seeds.data_ptr(),
    )  # fmt: skip
