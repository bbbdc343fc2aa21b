"""`SamplingMetadata`: what the sampler derives from a list of sequences, cached while the list is
unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

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
from engine.sampling.uniforms import uniforms
from kernels.compiled_decoder import StepSamplingParams
from kernels.logit_edits import LogitEdits
from kernels.tensors import to_device

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


def _num_candidates(params: SamplingParams, eos_token_ids: Sequence[int]) -> int:
    ends = end_tokens(params, eos_token_ids)
    return max(candidates_needed(params.beam_width, len(ends)), params.logprobs or 0)


def seeds_of(states: Sequence[RequestSamplingState]) -> NDArray[np.uint64]:
    """Return the seeds, uint64 [len(states)]."""
    return np.array([state.seed % 2**64 for state in states], dtype=np.uint64)


def step_sampling_params(
    states: Sequence[RequestSamplingState], vocab_size: int, device: torch.device
) -> StepSamplingParams:
    """Return the kernels' parameters for rows of these states, including greedy ones."""
    params = [state.params for state in states]
    top_k = [vocab_size if p.top_k < 1 else p.top_k for p in params]
    temperature = [0.0 if p.greedy else p.temperature for p in params]
    return StepSamplingParams(
        to_device(torch.tensor(temperature, dtype=torch.float32), device),
        to_device(torch.tensor(top_k, dtype=torch.int64), device),
        to_device(torch.tensor([p.top_p for p in params], dtype=torch.float64), device),
        to_device(torch.tensor([p.min_p for p in params], dtype=torch.float64), device),
        torch.from_numpy(seeds_of(states).view(np.int64)),
    )


class SamplingMetadata:
    """A list of sequences, and what sampling needs of them.

    Attributes:
        states: one per row.
        is_greedy: whether all rows take the most likely token.
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
        self.is_greedy = all(params[row].greedy for row in drawn) and not beams
        self.logprobs = self._rows([row for row in drawn if params[row].logprobs is not None])
        self.num_logprobs = [params[row].logprobs or 0 for row in self.logprobs.rows]
        #: Indices into `logprobs.rows` -> tokens that are scored instead of the top ones.
        self.logprob_token_ids = {
            index: requested
            for index, row in enumerate(self.logprobs.rows)
            if (requested := params[row].logprob_token_ids)
        }
        self.seeds = seeds_of(states)
        self._table: NDArray[np.float64] = np.zeros((len(states), 0))
        self._table_start: NDArray[np.int64] = np.zeros(len(states), dtype=np.int64)

    def _rows(self, rows: Sequence[int]) -> RowSelection:
        return RowSelection(rows, len(self.states), self.device)

    @cached_property
    def params(self) -> StepSamplingParams:
        """The rows' parameters."""
        return step_sampling_params(self.states, self.vocab_size, self.device)

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
