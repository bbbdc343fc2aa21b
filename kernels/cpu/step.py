"""`CompiledStep` of the CPU: addresses are bound once while the same sequences decode."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kernels.compiled_decoder import (
    BatchTables,
    BoundStep,
    CompiledStep,
    EmbeddingAndHead,
    LogitEditParams,
    StepLogprobs,
    StepSamplingParams,
)
from kernels.cpu import abi as c
from kernels.cpu.library import Library, check, check_dense
from kernels.cpu.lora import LoraSegments
from kernels.cpu.memory import num_threads
from kernels.cpu.moe import handle_of
from kernels.lora import TableSegment


class LogitEditArrays:
    """The edits of a step's rows as C++ structs; owns the arrays to which these point.

    Raises ValueError for inconsistent edits, and for tokens outside of the vocabulary.

    Attributes:
        address: address of the table.
        max_logprobs: maximum number of top tokens that a row requests; -1 if none requests any.
    """

    def __init__(self, edits: Sequence[LogitEditParams], count: int, vocab_size: int) -> None:
        if len(edits) != count:
            raise ValueError(f"there must be edits for each of {count} rows")
        self._vocab_size = vocab_size
        self._references: list[object] = [edits]
        self._table = (c.RowEdits * count)(*(self._row(row) for row in edits))
        self.address = ctypes.addressof(self._table)
        self.max_logprobs = min(vocab_size, max((row.num_logprobs for row in edits), default=-1))

    def _row(self, edits: LogitEditParams) -> c.RowEdits:
        if edits.allowed is not None:
            check_dense("allowed", edits.allowed, (-(-self._vocab_size // 32),), torch.int32)
        if any(len(word) < 2 for word in edits.words):
            raise ValueError("a bad word must have two tokens or more")
        starts = [0]
        for word in edits.words:
            starts.append(starts[-1] + len(word))
        biases = (ctypes.c_float * len(edits.bias))(*edits.bias.values())
        self._references.append(biases)
        return c.RowEdits(
            allowed=None if edits.allowed is None else edits.allowed.data_ptr(),
            forbidden=self._ids(edits.forbidden),
            num_forbidden=len(edits.forbidden),
            words=self._ids([token for word in edits.words for token in word]),
            word_starts=self._array(ctypes.c_int64, starts),
            num_words=len(edits.words),
            ends=self._ids(edits.ends),
            num_ends=len(edits.ends),
            min_tokens=edits.min_tokens,
            biased=self._ids(edits.bias),
            biases=ctypes.addressof(biases),
            num_biased=len(edits.bias),
            repetition=edits.repetition,
            frequency=edits.frequency,
            presence=edits.presence,
            counts_prompt=edits.counts_prompt,
            num_logprobs=edits.num_logprobs,
        )

    def _ids(self, tokens: Iterable[int]) -> int:
        token_ids = list(tokens)
        if any(not 0 <= token < self._vocab_size for token in token_ids):
            raise ValueError(f"tokens must be in [0, {self._vocab_size})")
        return self._array(ctypes.c_int32, token_ids)

    def _array(self, of: type[ctypes.c_int32] | type[ctypes.c_int64], values: list[int]) -> int:
        array = (of * len(values))(*values)
        self._references.append(array)
        return ctypes.addressof(array)


class CpuStep(CompiledStep):
    """Decode steps of a decoder; owns the layers and tensors to which it points.

    Raises ValueError for inconsistent arguments.
    """

    def __init__(
        self,
        library: Library,
        decoder: tuple[int, object],
        hidden_size: int,
        ends: EmbeddingAndHead,
        tables: BatchTables,
        taps: ctypes.Array[ctypes.c_int64],
    ) -> None:
        """`decoder`: its address and its owner; `taps`: layers whose inputs the step returns."""
        self._references = (decoder[1], ends, tables, taps)
        described = _embedding_and_head(decoder[0], hidden_size, ends)
        described.taps, described.num_taps = ctypes.addressof(taps), len(taps)
        block_tables = (c.BlockTable * len(tables.block_tables))(
            *(c.BlockTable(table.data_ptr(), table.shape[-1]) for table in tables.block_tables)
        )
        handle = library.step_new(
            ctypes.byref(described), ctypes.byref(_tables(tables, block_tables))
        )
        if not handle:
            raise MemoryError("no memory for the description of a step")
        self.handle, self.run = handle, library.step_run
        self.vocab_size = ends.head.out_features
        self.hidden_width = hidden_size * max(1, len(taps))
        weakref.finalize(self, library.step_free, handle).atexit = False  # as in `CpuLinear`

    def bind(
        self,
        rows: Tensor,
        choice: StepSamplingParams | None,
        logits: Tensor | None = None,
        adapters: Sequence[TableSegment] = (),
    ) -> BoundStep:
        return CpuBoundStep(self, rows, choice, logits, LoraSegments(adapters))


class CpuBoundStep(BoundStep):
    """A step of these rows; owns the tensors to which its C++ structs point."""

    def __init__(
        self,
        step: CpuStep,
        rows: Tensor,
        choice: StepSamplingParams | None,
        logits: Tensor | None,
        adapters: LoraSegments,
    ) -> None:
        count, self._vocab_size = len(rows), step.vocab_size
        self._hidden_width = step.hidden_width
        check_dense("rows", rows, (count,), torch.int64)
        chosen = count if logits is None else count - len(logits)
        if logits is not None:
            check_dense("logits", logits, (len(logits), self._vocab_size), torch.float32)
        if chosen < 0:
            raise ValueError("logits must have at most as many rows as the step")
        described, edits = None, None
        if choice is not None:
            edits = (
                LogitEditArrays(choice.edits, chosen, self._vocab_size) if choice.edits else None
            )
            described = ctypes.byref(_sampling_params(choice, chosen, edits))
        self._references = (step, rows, choice, logits, adapters, edits)
        self._max_logprobs = -1 if edits is None else edits.max_logprobs
        self._run, self._count, self._chosen = step.run, count, chosen
        self._out = (ctypes.c_int64 * chosen)()
        self._step_scores = self._new_scores(chosen)
        self._result = _result(self._out, None, logits, self._step_scores)
        self._rows = (step.handle, rows.data_ptr())
        self._rest = (count, chosen, described)
        self._adapters = (adapters.table, adapters.count)
        self._args = (*self._rows, None, *self._rest, ctypes.byref(self._result), *self._adapters)

    def __call__(
        self,
        drafts: Sequence[int] | None = None,
        logits: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> list[list[int]]:
        if drafts is not None:
            return self._verify(drafts, logits, hidden)
        # The usual step, whose arguments are created only once.
        self.scores = self._step_scores
        self._result.hidden = self._hidden_address(hidden, self._count)
        if status := self._run(*self._args, num_threads()):
            check(status)
        return [[token] if token >= 0 else [] for token in self._out]

    def _verify(
        self, drafts: Sequence[int], logits: Tensor | None, hidden: Tensor | None
    ) -> list[list[int]]:
        counts = (ctypes.c_int64 * self._count)(*drafts)
        drawn = sum(drafts[: self._chosen]) + self._chosen
        num_logits = sum(drafts) + self._count - drawn
        if len(drafts) != self._count or (
            num_logits and (logits is None or len(logits) != num_logits)
        ):
            raise ValueError(f"drafts of {self._count} rows, and logits of {num_logits} tokens")
        if logits is not None:
            check_dense("logits", logits, (num_logits, self._vocab_size), torch.float32)
        out, got = (ctypes.c_int64 * drawn)(), (ctypes.c_int64 * self._chosen)()
        self.scores = self._new_scores(drawn)
        result = _result(out, got, logits, self.scores)
        result.hidden = self._hidden_address(hidden, drawn + num_logits)
        args = (*self._rows, counts, *self._rest, ctypes.byref(result), *self._adapters)
        if status := self._run(*args, num_threads()):
            check(status)
        tokens, start = [], 0
        for row, count in enumerate(got):
            tokens.append(out[start : start + count])
            start += 1 + drafts[row]
        return tokens

    def _hidden_address(self, hidden: Tensor | None, tokens: int) -> int | None:
        """Return the address of the buffer for the inputs of the output layer or of the taps'
        layers.
        """
        if hidden is None:
            return None
        check_dense("hidden", hidden, (tokens, self._hidden_width), torch.float32)
        return hidden.data_ptr()

    def _new_scores(self, tokens: int) -> StepLogprobs | None:
        if self._max_logprobs < 0:
            return None
        shape = (tokens, 1 + self._max_logprobs)
        ids, ranks = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        return StepLogprobs(ids, torch.zeros(shape), ranks)


def layer_indices(layers: Sequence[int], count: int) -> ctypes.Array[ctypes.c_int64]:
    """Return indices of `count` layers. Raises ValueError unless they ascend and exist."""
    indices = list(layers)
    if indices != sorted(set(indices)) or not all(0 <= index < count for index in indices):
        raise ValueError(f"layers must ascend and be less than {count}; got {indices}")
    return (ctypes.c_int64 * len(indices))(*indices)


def _result(
    out: ctypes.Array[ctypes.c_int64],
    got: ctypes.Array[ctypes.c_int64] | None,
    logits: Tensor | None,
    scores: StepLogprobs | None,
) -> c.StepResult:
    result = c.StepResult(
        out=ctypes.addressof(out),
        got=None if got is None else ctypes.addressof(got),
        open=None if logits is None else logits.data_ptr(),
    )
    if scores is not None:
        result.ids, result.values, result.ranks = (table.data_ptr() for table in scores)
        result.most = scores.ids.shape[1] - 1
    return result


def _embedding_and_head(decoder: int, hidden: int, ends: EmbeddingAndHead) -> c.StepEnds:
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


def _tables(tables: BatchTables, block_tables: ctypes.Array[c.BlockTable]) -> c.StepTables:
    """Return the tables' struct. The library copies `block_tables`, which must live until then."""
    rows, max_tokens = tables.tokens.shape
    check_dense("tokens", tables.tokens, (rows, max_tokens), torch.int32)
    for table in tables.block_tables:
        check_dense("block_tables", table, (rows, table.shape[-1]), torch.int32)
    counts = (tables.num_prompt, tables.num_tokens, tables.num_computed, tables.rope_offsets)
    for count in counts:
        check_dense("counts", count, (rows,), torch.int64)
    blocks, state_tokens = tables.state_blocks, tables.state_tokens
    if (blocks is None) != (state_tokens is None):
        raise ValueError("state_blocks and state_tokens go together")
    if blocks is not None and state_tokens is not None:
        check_dense("state_blocks", blocks, (rows, 1), torch.int32)
        check_dense("state_tokens", state_tokens, state_tokens.shape, torch.int64)
    return c.StepTables(
        tokens=tables.tokens.data_ptr(),
        token_stride=max_tokens,
        block_tables=ctypes.addressof(block_tables),
        num_groups=len(block_tables),
        num_prompt=tables.num_prompt.data_ptr(),
        num_tokens=tables.num_tokens.data_ptr(),
        num_computed=tables.num_computed.data_ptr(),
        rope_offsets=tables.rope_offsets.data_ptr(),
        num_rows=rows,
        state_blocks=None if blocks is None else blocks.data_ptr(),
        state_tokens=None if state_tokens is None else state_tokens.data_ptr(),
        num_state_blocks=0 if state_tokens is None else len(state_tokens),
    )


def _sampling_params(
    choice: StepSamplingParams, count: int, edits: LogitEditArrays | None
) -> c.StepChoice:
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
        edits=None if edits is None else edits.address,
    )
