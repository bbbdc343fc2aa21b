"""`Sampler`: one step's logits to one token for each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.protocol import TokenLogprobs
from engine.sampling.batch import Batch
from engine.sampling.compiled import CompiledChoice
from engine.sampling.draw import BROKEN, draw
from engine.sampling.filters import sample_filtered
from engine.sampling.logprobs import RawLogprobs, best_candidates
from engine.sampling.state import SequenceSampling
from engine.sampling.token_mask import MaskedRows
from engine.sampling_params import GREEDY_EPS
from kernels import KernelSet

NOT_FINITE = "No token can be chosen: the logits hold NaN or infinity, or every token is forbidden."


@dataclass(slots=True)
class SamplerOutput:
    """One step's choice.

    Attributes:
        token_ids: [rows] int64, on the logits' device; `BROKEN` (-1) in rows with an error.
        logprobs: [rows]; None for a sequence that wants none. They are the model's own, before
            temperature, penalties and filters.
        errors: row to what went wrong with it; the other rows are as if it weren't there.
        candidates: row of a beam to its likeliest next tokens, best first, by their log
            probabilities after constraints, penalties and temperature. Its token is `BROKEN`.
    """

    token_ids: Tensor
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)
    candidates: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Chooses tokens. One instance serves one engine; it keeps what it derived of the last batch.

    The order of things: raw log probabilities; allowed_token_ids; bad words; min_tokens;
    logit_bias; logits processors; penalties; grammar masks; then greedy rows take the maximum, and
    the others temperature, min-p, top-k, top-p and a draw.

    Args:
        eos_token_ids: what `min_tokens` holds back unless `ignore_eos`.
        ops: kernels to choose with; None: torch.
    """

    def __init__(self, eos_token_ids: Iterable[int] = (), ops: KernelSet | None = None) -> None:
        self._compiled = None if ops is None else CompiledChoice(ops)
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._batch: Batch | None = None

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        states: Sequence[SequenceSampling],
        mask: MaskedRows | None = None,
    ) -> SamplerOutput:
        """The next token of each sequence.

        Args:
            logits: [rows, vocab], any float type. May be overwritten.
            states: [rows]. While the same objects come in the same order, what was derived from
                them is used again.
            mask: what grammars allow, for some of the rows.

        Raises:
            ValueError: the number of rows and of states differ.
        """
        if logits.dim() != 2 or len(logits) != len(states):
            raise ValueError(f"logits of {tuple(logits.shape)} for {len(states)} sequences")
        if not len(states):
            return SamplerOutput(torch.empty(0, dtype=torch.int64, device=logits.device), [])
        batch = self._batch_of(states, logits)
        untouched = batch.untouched and mask is None
        if untouched and len(batch.greedy) == len(states) and not len(batch.logprobs):
            return self._output(self._greedy(logits), {}, None, batch)
        raw = None
        if len(batch.logprobs):
            own = batch.logprobs.of(logits).float()
            if not untouched and own.data_ptr() == logits.data_ptr():
                own = own.clone()  # what follows writes over the logits
            raw = RawLogprobs.of(own, max(batch.num_logprobs))
        work = logits.float()
        errors = self._adjust(work, batch)
        if mask is not None:
            mask.apply(work)
        output = self._output(self._choose(work, batch), errors, raw, batch)
        if len(batch.beams):
            self._add_candidates(work, batch, output)
        return output

    @staticmethod
    def _add_candidates(logits: Tensor, batch: Batch, output: SamplerOutput) -> None:
        """Beams get candidates instead of a token; one without any keeps its error."""
        rows = batch.beams.rows
        temperatures = [batch.states[row].params.temperature for row in rows]
        own = batch.beams.of(logits)
        if any(temperature not in (0, 1) for temperature in temperatures):
            divisors = [t if t >= GREEDY_EPS else 1.0 for t in temperatures]
            own = own / torch.tensor(divisors, device=own.device)[:, None]
        for row, found in zip(rows, best_candidates(own, batch.num_candidates), strict=True):
            if found.token_ids and output.errors.get(row) in (None, NOT_FINITE):
                output.candidates[row] = found
                output.errors.pop(row, None)

    def _batch_of(self, states: Sequence[SequenceSampling], logits: Tensor) -> Batch:
        batch = self._batch
        if (
            batch is None
            or batch.states != list(states)
            or batch.vocab_size != logits.shape[-1]
            or batch.device != logits.device
        ):
            batch = Batch(states, self._eos_token_ids, logits.shape[-1], logits.device)
            self._batch = batch
        return batch

    @staticmethod
    def _adjust(logits: Tensor, batch: Batch) -> dict[int, str]:
        """Apply to `logits`, in place, all that greedy rows see too; returns errors by row."""
        if not batch.constraints.empty:
            batch.constraints.apply(logits)
        errors = {} if batch.processors.empty else batch.processors.apply(logits)
        if batch.penalised:
            batch.penalties.apply(logits)
        return errors

    def _greedy(self, logits: Tensor) -> Tensor:
        if self._compiled is not None and self._compiled.takes(logits):
            return self._compiled.greedy(logits)
        return _greedy(logits)

    def _choose(self, logits: Tensor, batch: Batch) -> Tensor:
        """[rows] tokens."""
        if len(batch.greedy) == len(logits):
            return self._greedy(logits)
        if self._compiled is not None and self._compiled.takes(logits):
            return self._compiled.sample(logits, batch.states, batch.uniform())
        tokens = torch.full((len(logits),), BROKEN, dtype=torch.int64, device=logits.device)
        uniform = batch.uniform()
        if len(batch.greedy):
            batch.greedy.put(tokens, _greedy(batch.greedy.of(logits)))
        for group in batch.filtered:
            rows = group.rows
            drawn = sample_filtered(rows.of(logits), group.filters, rows.of(uniform))
            rows.put(tokens, drawn)
        if len(batch.free):
            chosen = batch.free.of(logits)
            if batch.free_temperature is not None:
                chosen = chosen / batch.free_temperature
            weights = torch.softmax(chosen, dim=-1)
            batch.free.put(tokens, draw(weights, batch.free.of(uniform)))
        return tokens

    @staticmethod
    def _output(
        tokens: Tensor, errors: dict[int, str], raw: RawLogprobs | None, batch: Batch
    ) -> SamplerOutput:
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if raw is not None:
            chosen = batch.logprobs.of(tokens).clamp(min=0)
            entries = raw.at(chosen, batch.num_logprobs)
            for row, entry, good in zip(
                batch.logprobs.rows, entries, torch.isfinite(raw.normalizer).tolist(), strict=True
            ):
                logprobs[row] = entry
                if not good:
                    errors.setdefault(row, NOT_FINITE)
        for row in (tokens < 0).nonzero().squeeze(-1).tolist():
            errors.setdefault(row, NOT_FINITE)
        for row in errors:
            tokens[row] = BROKEN
            logprobs[row] = None
        return SamplerOutput(tokens, logprobs, errors)


def _greedy(logits: Tensor) -> Tensor:
    """[n] likeliest tokens; `BROKEN` where the largest logit isn't finite."""
    best = logits.argmax(dim=-1)
    value = logits.gather(1, best[:, None]).squeeze(-1)
    return torch.where(torch.isfinite(value), best, BROKEN)
