"""`Sampler`: samples one token per sequence from a step's logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contract.messages import TokenLogprobs
from engine.contract.sampling_params import GREEDY_EPS
from engine.sampling.constraints import suppressed_stop_ids
from engine.sampling.custom_processors import LogitsProcessors
from engine.sampling.logprobs import LogprobsComputer, LogprobsTensors, best_candidates
from engine.sampling.metadata import SamplingMetadata, step_sampling_params
from engine.sampling.penalties import GpuPenalties, is_penalized
from engine.sampling.rejection_sampler import TypicalAcceptanceSampler
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.token_bitmask import TokenBitmask, pack_bits
from kernels import KernelSet
from kernels.compiled_decoder import LogitEditParams, StepSamplingParams
from kernels.logit_edits import LogitEdits
from kernels.reference import sampling as by_torch

#: Token of a row that can't be sampled from.
INVALID_TOKEN = -1
#: Edits of a sequence whose logits stay unchanged.
NO_EDITS = LogitEditParams()


def logit_edits_for(
    state: RequestSamplingState, eos_token_ids: Sequence[int], vocab_size: int
) -> LogitEditParams:
    """A sequence's logit edits for a compiled step.

    Results are bit-identical to `Constraints`, `Penalties` and `LogprobsComputer`.
    """
    params = state.params
    if not (
        params.logprobs is not None
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.logit_bias
        or params.min_tokens
        or is_penalized(state)
    ):
        return NO_EDITS

    def in_vocabulary(tokens: Iterable[int]) -> list[int]:
        return [token for token in tokens if 0 <= token < vocab_size]

    bias, words = params.logit_bias or {}, params.bad_words_token_ids or []
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = torch.from_numpy(pack_bits([params.allowed_token_ids], vocab_size)[0])
    return LogitEditParams(
        allowed=allowed,
        forbidden=in_vocabulary(word[0] for word in words if len(word) == 1),
        words=[word for word in words if len(word) > 1 and len(in_vocabulary(word)) == len(word)],
        ends=in_vocabulary(suppressed_stop_ids(state, eos_token_ids)),
        min_tokens=params.min_tokens,
        bias={token: float(bias[token]) for token in in_vocabulary(bias)},
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        counts_prompt=bool(state.prompt_token_ids),
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
    )


NON_FINITE_LOGITS = (
    "No token can be chosen: the logits hold NaN or infinity, or every token is forbidden."
)


@dataclass(slots=True)
class SamplerOutput:
    """The sampled tokens of one step.

    Attributes:
        token_ids: [rows] int64, on the logits' device; `INVALID_TOKEN` (-1) in rows with an error.
        logprobs: [rows]; None for sequences without them. They are raw: before temperature,
            penalties and filters.
        errors: row -> error message; other rows are unaffected.
        candidates: row of a beam -> its most likely next tokens, best first, by log probability
            after constraints, penalties and temperature. The row's token has no meaning.
    """

    token_ids: Tensor
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)
    candidates: dict[int, TokenLogprobs] = field(default_factory=dict)


@dataclass(slots=True)
class PendingSamplerOutput:
    """A `SamplerOutput` whose tensors the device may still be computing.

    Attributes:
        token_ids: [rows] int64, on the logits' device; `INVALID_TOKEN` if sampling failed.
        errors, candidates: see `SamplerOutput`.
        table: log probabilities of `rows`, each with its `counts` top tokens.
    """

    token_ids: Tensor
    errors: dict[int, str] = field(default_factory=dict)
    candidates: dict[int, TokenLogprobs] = field(default_factory=dict)
    table: LogprobsTensors | None = None
    rows: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that `finalize` needs on the host."""
        return [self.token_ids, *(self.table or ())]

    @torch.inference_mode()
    def finalize(self, tensors: Sequence[Tensor]) -> SamplerOutput:
        """Return the output from `self.tensors`, or from copies of them on the host."""
        token_ids, *table = tensors
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        errors = dict(self.errors)
        if table:
            scores = LogprobsTensors(*table)
            entries = scores.to_lists(self.counts)
            for row, entry, finite in zip(self.rows, entries, scores.finite.tolist(), strict=True):
                logprobs[row] = entry
                if not finite and row not in self.candidates:
                    errors.setdefault(row, NON_FINITE_LOGITS)
        for row, token_id in enumerate(token_ids.tolist()):
            if token_id < 0 and row not in self.candidates:
                errors.setdefault(row, NON_FINITE_LOGITS)
        for row in errors:
            token_ids[row] = INVALID_TOKEN
            logprobs[row] = None
        return SamplerOutput(token_ids, logprobs, errors, self.candidates)


class Sampler:
    """Samples tokens. One instance serves one engine, and caches what it derived of the last batch.

    Order of operations: raw log probabilities; allowed_token_ids; bad words; min_tokens;
    logit_bias; logits processors, the engine's and a request's; penalties; grammar masks. Then
    greedy rows take the argmax; the others get temperature, the engine's argmax-invariant
    processors, min-p, top-k, top-p and a random draw.

    Args:
        eos_token_ids: tokens that `min_tokens` forbids unless `ignore_eos`.
        ops: kernels to sample with; None: torch.
        acceptance: accepts more drafts than those that are sampled; None: doesn't.
        custom: the engine's logits processors.
    """

    def __init__(
        self,
        eos_token_ids: Iterable[int] = (),
        ops: KernelSet | None = None,
        acceptance: TypicalAcceptanceSampler | None = None,
        custom: LogitsProcessors | None = None,
    ) -> None:
        self._custom = custom
        self._acceptance = acceptance
        self._ops = ops
        self._penalties: GpuPenalties | None = None
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._batch: SamplingMetadata | None = None

    def sample(
        self,
        logits: Tensor,
        states: Sequence[RequestSamplingState],
        mask: TokenBitmask | None = None,
        drafts: Mapping[int, int] | None = None,
    ) -> SamplerOutput:
        """Sample the next token of each sequence.

        Args:
            logits: [rows, vocab], any float type. May be overwritten.
            states: [rows]. Derived data is cached as long as the same objects come in the same
                order.
            mask: grammar bitmasks for some of the rows.
            drafts: row -> the draft that its token is compared with.

        Raises:
            ValueError: the number of rows and of states differ.
        """
        choice = self.sample_async(logits, states, mask, drafts=drafts)
        return choice.finalize(choice.tensors)

    @torch.inference_mode()
    def sample_async(
        self,
        logits: Tensor,
        states: Sequence[RequestSamplingState],
        mask: TokenBitmask | None = None,
        lengths: NDArray[np.int64] | None = None,
        drafts: Mapping[int, int] | None = None,
    ) -> PendingSamplerOutput:
        """As `sample`, without waiting for the device unless there are beams or logits processors.

        `lengths`: number of earlier output tokens, int64 [rows]; None: those of the states.
        """
        if logits.dim() != 2 or len(logits) != len(states):
            raise ValueError(f"logits of {tuple(logits.shape)} for {len(states)} sequences")
        if not len(states):
            return PendingSamplerOutput(torch.empty(0, dtype=torch.int64, device=logits.device))
        batch = self._batch_of(states, logits)
        untouched = batch.is_unmodified and mask is None and self._custom is None
        if untouched and batch.is_greedy and not len(batch.logprobs):
            return PendingSamplerOutput(self._choose(logits.float(), batch, lengths))
        raw = None
        if len(batch.logprobs):
            scored = batch.logprobs.of(logits).float()
            if not untouched and scored.data_ptr() == logits.data_ptr():
                scored = scored.clone()  # the logits are modified in place below
            raw = LogprobsComputer(
                scored, max(batch.num_logprobs), self.ops_for(scored), batch.logprob_token_ids
            )
        work = logits.float()
        errors = self._adjust(work, batch)
        if mask is not None:
            mask.apply(work, self.edits_of(work))
        if self._custom is not None:
            self._custom.apply_to_draws(work)
        accepted = (
            {} if self._acceptance is None else self._acceptance.accepted(work, states, drafts)
        )
        choice = PendingSamplerOutput(self._choose(work, batch, lengths), errors)
        if accepted:
            choice.token_ids[list(accepted)] = torch.tensor(list(accepted.values()))
        if raw is not None:
            chosen = batch.logprobs.of(choice.token_ids).clamp(min=0)
            choice.table = raw.table(chosen)
            choice.rows, choice.counts = batch.logprobs.rows, batch.num_logprobs
        if len(batch.beams):
            self._add_candidates(work, batch, choice)
        return choice

    def for_vocabulary(self) -> Sampler:
        """Return a sampler for another vocabulary size, with separate logits processors."""
        custom = None if self._custom is None else self._custom.sibling()
        return Sampler(self._eos_token_ids, self._ops, self._acceptance, custom)

    def can_use_kernels(self, state: RequestSamplingState) -> bool:
        """Whether kernels can sample a sequence's next token without Python.

        Grammar bitmasks come with a step, so they aren't considered here.
        """
        params = state.params
        if self._custom is not None or (self._acceptance is not None and not params.greedy):
            return False
        return self._ops is not None and not (
            params.use_beam_search or params.logits_processors or params.logprob_token_ids
        )

    def step_choice(
        self, states: Sequence[RequestSamplingState], vocab_size: int
    ) -> StepSamplingParams | None:
        """Return sampling parameters of plain sequences for the kernels; None: all are greedy."""
        edits = [logit_edits_for(state, self._eos_token_ids, vocab_size) for state in states]
        has_edits = any(edit is not NO_EDITS for edit in edits)
        if not has_edits and all(state.params.greedy for state in states):
            return None
        choice = step_sampling_params(states, vocab_size, torch.device("cpu"))
        return replace(choice, edits=edits) if has_edits else choice

    def needs_host_sync(self, logits: Tensor, states: Sequence[RequestSamplingState]) -> bool:
        """Whether sampling for these states reads the tokens that they have generated so far."""
        if not len(states):
            return False
        return self._custom is not None or self._batch_of(states, logits).reads_outputs

    def needs_sync_steps(self, states: Sequence[RequestSamplingState]) -> bool:
        """Whether the host must see the sampled tokens before the next step starts."""
        return self._custom is not None or any(
            state.params.use_beam_search or state.params.logits_processors for state in states
        )

    @staticmethod
    def _add_candidates(
        logits: Tensor, batch: SamplingMetadata, choice: PendingSamplerOutput
    ) -> None:
        """Add the candidates of beams, which get no token; a beam without any keeps its error."""
        rows = batch.beams.rows
        temperatures = [batch.states[row].params.temperature for row in rows]
        beam_logits = batch.beams.of(logits)
        if any(temperature not in (0, 1) for temperature in temperatures):
            divisors = [t if t >= GREEDY_EPS else 1.0 for t in temperatures]
            beam_logits = beam_logits / torch.tensor(divisors, device=logits.device)[:, None]
        best = best_candidates(beam_logits, batch.num_candidates)
        for row, candidates in zip(rows, best, strict=True):
            if candidates.token_ids and row not in choice.errors:
                choice.candidates[row] = candidates

    def _batch_of(self, states: Sequence[RequestSamplingState], logits: Tensor) -> SamplingMetadata:
        batch = self._batch
        if (
            batch is None
            or batch.states != list(states)
            or batch.vocab_size != logits.shape[-1]
            or batch.device != logits.device
        ):
            edits = self.edits_of(logits)
            batch = SamplingMetadata(
                states, self._eos_token_ids, logits.shape[-1], logits.device, edits
            )
            self._batch = batch
            self._assign_penalties(batch, edits)
        return batch

    def edits_of(self, logits: Tensor) -> LogitEdits | None:
        """The kernels that change logits in place, if there are any for this device."""
        ops = self.ops_for(logits)
        return None if ops is None else ops.edits

    def ops_for(self, logits: Tensor) -> KernelSet | None:
        """The kernels, if they are for the logits' device."""
        ops = self._ops
        return None if ops is None or logits.device.type != ops.device.type else ops

    def _assign_penalties(self, batch: SamplingMetadata, edits: LogitEdits | None) -> None:
        """Assign the batch's sequences to the penalties on the device."""
        if edits is None or not (batch.penalized or self._penalties is not None):
            self._penalties = None
            return
        if self._penalties is None or not self._penalties.has_capacity(
            batch.vocab_size, batch.device
        ):
            self._penalties = GpuPenalties(edits, batch.vocab_size, batch.device)
        self._penalties.assign(batch.penalties.rows.tolist(), batch.penalties.states)

    def _adjust(self, logits: Tensor, batch: SamplingMetadata) -> dict[int, str]:
        """Apply everything up to penalties to `logits` in place; return errors by row."""
        if not batch.constraints.empty:
            batch.constraints.apply(logits)
        if self._custom is not None:
            self._custom.update(batch.states)
            self._custom.apply(logits)
        errors = {} if batch.processors.empty else batch.processors.apply(logits)
        if batch.penalized:
            (self._penalties or batch.penalties).apply(logits)
        return errors

    def _choose(
        self, logits: Tensor, batch: SamplingMetadata, lengths: NDArray[np.int64] | None
    ) -> Tensor:
        """Return [rows] tokens for float32 logits."""
        ops = self.ops_for(logits) or by_torch
        if batch.is_greedy:
            return ops.argmax(logits.contiguous())
        params, numbers = batch.params, batch.uniforms(lengths)
        return ops.sample(
            logits.contiguous(),
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            numbers,
        )
