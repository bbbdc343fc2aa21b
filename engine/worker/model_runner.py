"""`ModelRunner`: one step on one device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engine.contract.messages import TokenLogprobs
from engine.models.decoder import AuxHiddenStates, NativeDecoder
from engine.models.forward_context import AttentionMetadata
from engine.models.interface import EngineModel
from engine.models.lora import StepAdapters
from engine.sampling.logprobs import CHUNK, prompt_logprobs
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import Sampler, SamplerOutput
from engine.sampling.token_bitmask import TokenBitmask
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.compiled_step import CompiledStepRunner
from engine.worker.hidden_states import HiddenStateStore
from engine.worker.input_batch import InputBatch
from engine.worker.interface import BitmaskInbox, CompletedStep, PendingStep
from engine.worker.sampling_io import bitmask_rows, collect_outputs, draft_by_logits_row
from engine.worker.step_inputs import StepInputs
from kernels.tensors import to_device

# -- From a step's hidden states to logits and tokens, each row's over its own vocabulary.
#
# An adapter may bring tokens that its model hasn't. Its rows' logits have more columns than
# others',
# so each vocabulary's rows are a batch of their own here, and nobody's bits depend on who is
# beside.


#: Samplers of other vocabularies than the model's that stay when a step has no row of theirs.
_KEPT = 16


class StepLogits:
    """Logits of a step's hidden states, some rows at a time."""

    def __init__(self, model: EngineModel, hidden: Tensor, heads: StepAdapters) -> None:
        """`heads`: the adapters that change logits, by rows of `hidden`."""
        self._model, self._hidden, self._heads = model, hidden, heads

    def rows(self, start: int, end: int) -> Tensor:
        """Of rows [start, end), which are of one vocabulary."""
        if not self._heads:
            return self._model.logits(self._hidden[start:end])
        return self._adapted(self._hidden[start:end], self._heads.slice_rows(start, end))

    def compute(self, rows: Sequence[int]) -> Tensor:
        """Of these rows, which are of one vocabulary."""
        at = torch.tensor(rows)
        hidden = self._hidden[to_device(at, self._hidden.device)]
        if not self._heads:
            return self._model.logits(hidden)
        return self._adapted(hidden, self._heads.lm_head_adapters(at))

    def _adapted(self, hidden: Tensor, heads: StepAdapters) -> Tensor:
        model: Any = self._model  # one that takes adapters
        logits: Tensor = model.logits(hidden, heads)
        return logits


class PerVocabularySampler:
    """Samples a step's tokens, the rows of each vocabulary by a sampler of their own."""

    def __init__(self, sampler: Sampler) -> None:
        """`sampler`: of rows with the model's vocabulary."""
        self._sampler = sampler
        #: By vocabulary, used longest ago first.
        self._others: OrderedDict[int, Sampler] = OrderedDict()

    def sample(
        self,
        logits: StepLogits,
        states: Sequence[RequestSamplingState],
        mask: TokenBitmask | None,
        drafts: Mapping[int, int],
    ) -> SamplerOutput:
        """The next token of each sequence; see `Sampler.sample`."""
        groups: dict[int, list[int]] = {}
        for row, state in enumerate(states):
            groups.setdefault(state.vocab_size, []).append(row)
        if len(groups) == 1:
            (size,) = groups
            whole = logits.rows(0, len(states))
            return self._of(size).sample(whole, states, mask, drafts)
        made = SamplerOutput(torch.empty(len(states), dtype=torch.int64), [None] * len(states))
        for size, rows in groups.items():
            at = {row: place for place, row in enumerate(rows)}
            output = self._of(size).sample(
                logits.compute(rows),
                [states[row] for row in rows],
                None if mask is None else mask.of(rows),
                {at[row]: draft for row, draft in drafts.items() if row in at},
            )
            _put(made, rows, output)
        return made

    def _of(self, vocab_size: int) -> Sampler:
        """The sampler of a vocabulary; it remembers the rows of the step before."""
        if not vocab_size:
            return self._sampler
        found = self._others.pop(vocab_size, None) or self._sampler.for_vocabulary()
        self._others[vocab_size] = found
        while len(self._others) > _KEPT:
            self._others.popitem(last=False)
        return found


def _put(whole: SamplerOutput, rows: Sequence[int], output: SamplerOutput) -> None:
    """What was sampled for some rows."""
    whole.token_ids[rows] = output.token_ids.cpu()
    for row, scores in zip(rows, output.logprobs, strict=True):
        whole.logprobs[row] = scores
    whole.errors |= {rows[place]: why for place, why in output.errors.items()}
    whole.candidates |= {rows[place]: each for place, each in output.candidates.items()}


class ModelRunner:
    """Holds the model, its KV cache and the running batch."""

    #: Whether a pass gives the states of all tokens anyway.
    _returns_all = False

    def __init__(
        self,
        model: EngineModel,
        batch: InputBatch,
        sampler: Sampler,
        decodes: CompiledStepRunner | None = None,
        masks: BitmaskInbox | None = None,
        hidden: HiddenStateStore | None = None,
    ) -> None:
        """`is_decode`: runs the steps that it can in one call. `masks`: where grammars' come.
        `hidden`: keeps what tokens were drawn from; None: nobody asks.
        """
        self.model = model
        self.batch = batch
        self.sampler = sampler
        self._tokens = PerVocabularySampler(sampler)
        #: The model's forward pass; on a GPU with what leads the inputs there.
        self.forward: Callable[[torch.Tensor, AttentionMetadata], torch.Tensor] = model.forward
        self._compiled_step = decodes
        self._masks = masks or BitmaskInbox()
        self._hidden, self._saves_hidden = hidden, False
        self._taps = self._make_taps(() if hidden is None else hidden.aux_layers)
        self._retain_states = getattr(model, "keep", None) if model.stateful else None

    def _make_taps(self, layers: tuple[int, ...]) -> AuxHiddenStates | None:
        return AuxHiddenStates(layers) if layers else None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: inputs, forward, logits, sampling."""
        if self._compiled_step is None:
            return self.run(plan, self.prepare(plan))
        self._begin(plan)
        self._compiled_step.keeps = self._saves_hidden
        result = self._compiled_step.run(plan)
        return self.run(plan, self._inputs(plan)) if result is None else result

    def prepare(self, plan: StepPlan) -> StepInputs | None:
        """The step's inputs, without the tokens that the step before samples. None: no sequence.

        The batch takes over the plan's changes here, so a step that fails later can be taken back
        by removing its sequences.
        """
        self._begin(plan)
        return self._inputs(plan)

    def _begin(self, plan: StepPlan) -> None:
        """Take over the plan's changes, and find out whether its states are to be kept."""
        self.batch.apply_plan(plan)
        if self._hidden is not None:
            self._saves_hidden = self._hidden.begin(plan)

    def _inputs(self, plan: StepPlan) -> StepInputs | None:
        """As `prepare`, once the batch has the plan's changes."""
        if not plan.seq_ids:
            return None
        inputs = self.batch.prepare_inputs(plan)
        if self._retain_states is not None:
            inputs.occupied_rows = set(self.batch.row_of.values())
        return inputs

    @torch.inference_mode()
    def run(self, plan: StepPlan, inputs: StepInputs | None) -> StepResult:
        """Run a prepared step, after the one before. May be called in another thread."""
        if inputs is None:
            return StepResult.empty(0)
        if self._retain_states is not None:
            self._retain_states(inputs.occupied_rows)
        hidden, kept = self._hidden_states(inputs)
        result = StepResult.empty(len(plan.seq_ids))
        if len(hidden):
            logits = self._logits_of(inputs, hidden)
            if inputs.states:
                self._sample(plan, inputs, logits, result)
            self._score_prompts(plan, inputs, logits, result)
        if self._hidden is not None and self._saves_hidden:
            self._hidden.save(plan, inputs, kept, result)
        return result

    def _hidden_states(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Those that logits are made from, and those to keep."""
        tokens, context, keeper = self.batch.token_ids(inputs), inputs.context, self._hidden
        if (
            keeper is None
            or not keeper.needs_all_tokens
            or not (self._saves_hidden or self._returns_all)
        ):
            hidden = self.forward(tokens, context)
            copies = (
                self._saves_hidden and self._returns_all
            )  # a graph's, which the next step writes
            return hidden, hidden.clone() if copies else hidden
        wanted, at = context.logits_rows, keeper.tokens(inputs)
        if (
            keeper.aux_layers and not self._returns_all
        ):  # before the last layer, so it takes no token more
            hidden, taken = self._forward_with_aux(tokens, context)
            return hidden, taken[at]
        computed = self._rows_to_compute(wanted, at, len(tokens))
        context.logits_rows = None if computed is None else torch.from_numpy(computed)
        if keeper.aux_layers:
            hidden, taken = self._forward_with_aux(tokens, context)
        else:
            hidden = taken = self.forward(tokens, context)
        context.logits_rows = wanted
        kept = _select_rows(taken, computed, at)
        return hidden if wanted is None else _select_rows(hidden, computed, wanted.numpy()), kept

    def _rows_to_compute(
        self, wanted: torch.Tensor | None, kept: np.ndarray, count: int
    ) -> np.ndarray | None:
        """Of a step's `count` tokens those that the last layer must compute, ascending: whose
        logits are `wanted` (None: all), and those to be kept. None: all.
        """
        if wanted is None or self._returns_all:
            return None
        tokens = np.union1d(wanted.numpy(), kept)
        return None if len(tokens) == count else tokens

    def _forward_with_aux(
        self, tokens: torch.Tensor, context: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states of all tokens, and what the keeper's taps took."""
        model, taps = cast(NativeDecoder, self.model), self._taps
        if taps is None:
            raise RuntimeError("Nobody has asked for states between layers.")
        taps.clear()
        return model.forward(tokens, context, taps), taps.states()

    def _logits_of(self, inputs: StepInputs, hidden: torch.Tensor) -> StepLogits:
        """What makes the logits of some of the step's hidden states."""
        context = inputs.context
        return StepLogits(
            self.model, hidden, context.adapters.lm_head_adapters(context.logits_rows)
        )

    def launch(self, plan: StepPlan, inputs: Any) -> PendingStep:
        """See `Runner`: here a step is over once it was run."""
        return CompletedStep(self.run(plan, inputs))

    def reset(self) -> None:
        """See `Runner`: no step is under way once one has failed."""

    def _sample(
        self, plan: StepPlan, inputs: StepInputs, logits: StepLogits, result: StepResult
    ) -> None:
        """Sample a token for each sequence that has caught up."""
        mask = bitmask_rows(plan, inputs, self._masks)
        output = self._tokens.sample(logits, inputs.states, mask, draft_by_logits_row(inputs))
        collect_outputs(self.batch, plan, inputs, output, result)

    def _score_prompts(
        self, plan: StepPlan, inputs: StepInputs, logits_of: StepLogits, result: StepResult
    ) -> None:
        """Log probabilities of prompt tokens that were asked for.

        Some rows at a time: the logits of a whole step of prompts may not fit beside the model.
        """
        done = len(inputs.states)
        for index, state, first, count in inputs.prompt_logprob_rows:
            following = torch.tensor(state.prompt_token_ids[first : first + count])
            wanted = state.params.prompt_logprobs or 0
            scores: list[TokenLogprobs] = []
            for start in range(0, count, CHUNK):
                end = min(start + CHUNK, count)
                logits = logits_of.rows(done + start, done + end)
                ops = self.sampler.ops_for(logits)
                scores += prompt_logprobs(logits, following[start:end], wanted, ops)
            result.prompt_logprobs[plan.seq_ids[index]] = scores
            done += count


def _select_rows(
    states: torch.Tensor, tokens: np.ndarray | None, wanted: np.ndarray
) -> torch.Tensor:
    """A copy of the states of the tokens `wanted`; `states` are those of `tokens`, ascending, or of
    all of a step's: a graph's, perhaps, which the next step writes.
    """
    places = wanted if tokens is None else np.searchsorted(tokens, wanted)
    return states[to_device(torch.from_numpy(places), states.device)]
