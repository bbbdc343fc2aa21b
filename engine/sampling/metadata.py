"""`SamplingMetadata`: what the sampler derives from a list of sequences, cached while the list is
unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contract.sampling_params import SamplingParams
from engine.sampling.beam_search import candidates_needed, end_tokens
from engine.sampling.constraints import Constraints
from engine.sampling.custom_processors import RequestLogitsProcessors
from engine.sampling.penalties import Penalties, is_penalized
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.topk_topp import CANDIDATES, FilterParams, uniforms
from kernels.logit_edits import LogitEdits
from kernels.tensors import to_device

#: Maximum top_k for which a row is sampled from its largest logits alone.
SMALL_TOP_K = 256
#: Number of positions whose random numbers are generated at once.
LOOKAHEAD = 32


@cache
def _no_rows(device: torch.device) -> Tensor:
    """Return the shared empty index: most batches have no rows of most kinds, and each step with a
    prompt is a new batch.
    """
    return torch.empty(0, dtype=torch.int64, device=device)


class RowSelection:
    """Some rows of the logits. `index` is None for all rows, so that nothing is copied."""

    def __init__(self, rows: Sequence[int], total: int, device: torch.device) -> None:
        self.rows = list(rows)
        self.index: Tensor | None = None
        if not self.rows:
            self.index = _no_rows(device)
        elif len(self.rows) != total:
            self.index = to_device(torch.tensor(self.rows, dtype=torch.int64), device)

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of `tensor`: the tensor itself, or a copy."""
        return tensor if self.index is None else tensor[self.index]

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write `values` to these rows of `tensor`."""
        if self.index is None:
            tensor.copy_(values)
        else:
            tensor[self.index] = values


@dataclass(slots=True)
class FilteredRows:
    """Rows that are sampled with filters."""

    rows: RowSelection
    filters: FilterParams


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def _num_candidates(params: SamplingParams, eos_token_ids: Sequence[int]) -> int:
    ends = end_tokens(params, eos_token_ids)
    return max(candidates_needed(params.beam_width, len(ends)), params.logprobs or 0)


def seeds_of(states: Sequence[RequestSamplingState]) -> NDArray[np.uint64]:
    """Return the seeds, uint64 [len(states)]."""
    return np.array([state.seed % 2**64 for state in states], dtype=np.uint64)


class SamplingMetadata:
    """A list of sequences, grouped by how they are sampled.

    Attributes:
        states: one per row.
        greedy: rows that take the most likely token.
        free: random rows without filters, with `free_temperature` ([n, 1] float32; None if all 1).
        filtered: random rows with filters, in groups of equal width.
        beams: rows of beams; `num_candidates`: number of next tokens for each.
        logprobs: rows with log probabilities; `num_logprobs`: number of top tokens for each.
        seeds: uint64 [rows].
    """

    def __init__(
        self,
        states: Sequence[RequestSamplingState],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        edits: LogitEdits | None = None,
    ) -> None:
        self.states = list(states)
        self.vocab_size = vocab_size
        self.device = device
        params = [state.params for state in states]
        rows = range(len(params))
        self.constraints = Constraints(states, eos_token_ids, vocab_size, device, edits)
        self.processors = RequestLogitsProcessors(states)
        penalized = [row for row in rows if is_penalized(states[row])]
        self.penalties = Penalties(penalized, [states[row] for row in penalized])
        self.penalized = bool(penalized)
        beams = [row for row in rows if params[row].use_beam_search]
        drawn = [row for row in rows if not params[row].use_beam_search]
        self.beams = self._rows(beams)
        self.num_candidates = [_num_candidates(params[row], eos_token_ids) for row in beams]
        self.greedy = self._rows([row for row in drawn if params[row].greedy])
        self.logprobs = self._rows([row for row in drawn if params[row].logprobs is not None])
        self.num_logprobs = [params[row].logprobs or 0 for row in self.logprobs.rows]
        #: Indices into `logprobs.rows` -> tokens that are scored instead of the top ones.
        self.logprob_token_ids = {
            index: requested
            for index, row in enumerate(self.logprobs.rows)
            if (requested := params[row].logprob_token_ids)
        }
        self._sort_random([row for row in drawn if not params[row].greedy], params)
        self.seeds = seeds_of(states)
        self._table: NDArray[np.float64] = np.zeros((len(states), 0))
        self._table_start: NDArray[np.int64] = np.zeros(len(states), dtype=np.int64)

    def _rows(self, rows: Sequence[int]) -> RowSelection:
        return RowSelection(rows, len(self.states), self.device)

    def _sort_random(self, random: list[int], params: list[SamplingParams]) -> None:
        """Split random rows into those without filters, with narrow and with wide ones."""
        free = [row for row in random if not _is_filtered(params[row], self.vocab_size)]
        self.free = self._rows(free)
        self.free_temperature: Tensor | None = None
        if any(params[row].temperature != 1.0 for row in free):
            self.free_temperature = self._column([params[row].temperature for row in free])
        filtered = [row for row in random if _is_filtered(params[row], self.vocab_size)]
        small = [row for row in filtered if 0 < params[row].top_k <= SMALL_TOP_K]
        wide = [row for row in filtered if not 0 < params[row].top_k <= SMALL_TOP_K]
        self.filtered: list[FilteredRows] = []
        if small:
            width = max(params[row].top_k for row in small) + 1
            self.filtered.append(self._filtered(small, params, width))
        if wide:
            self.filtered.append(self._filtered(wide, params, CANDIDATES))

    def _column(self, values: list[float]) -> Tensor:
        return self._send(values, torch.float32)[:, None]

    def _send(self, values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self.device)

    def _filtered(self, rows: list[int], params: list[SamplingParams], width: int) -> FilteredRows:
        chosen = [params[row] for row in rows]
        vocab = self.vocab_size
        top_k = [vocab if p.top_k < 1 else min(p.top_k, vocab) for p in chosen]
        filters = FilterParams(
            temperature=self._column([p.temperature for p in chosen]),
            top_k=self._send(top_k, torch.int64),
            top_p=self._send([p.top_p for p in chosen], torch.float64),
            min_p=self._send([p.min_p for p in chosen], torch.float64),
            width=width,
            needs_mass=any(p.top_p < 1.0 and k >= width for p, k in zip(chosen, top_k)),
        )
        return FilteredRows(self._rows(rows), filters)

    def uniforms(self, lengths: NDArray[np.int64] | None = None) -> Tensor:
        """Return [rows] float64 in [0, 1), each a function of its sequence's seed and position.

        `lengths`: number of generated tokens of each; None: as in the states.
        """
        if lengths is None:
            lengths = np.array([len(state.output_token_ids) for state in self.states], np.int64)
        positions = lengths
        offset = positions - self._table_start
        if not self._table.size or offset.min() < 0 or offset.max() >= LOOKAHEAD:
            ahead = positions[:, None] + np.arange(LOOKAHEAD)
            self._table = uniforms(self.seeds[:, None], ahead)
            self._table_start = positions
            offset = np.zeros_like(positions)
        numbers = self._table[np.arange(len(offset)), offset]
        return to_device(torch.from_numpy(numbers), self.device)

    @property
    def reads_outputs(self) -> bool:
        """Whether sampling depends on earlier tokens in other ways than through the logits."""
        return bool(
            self.penalized
            or self.beams.rows
            or not self.processors.empty
            or self.constraints.reads_outputs
        )

    @property
    def is_unmodified(self) -> bool:
        """Whether the model's logits are used unchanged."""
        return self.constraints.empty and self.processors.empty and not self.penalized
