"""`ModelRunner`: one step on one device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engine.contract.messages import TokenLogprobs
from engine.models.aux_hidden_states import AuxHiddenStates
from engine.models.decoder import NativeDecoder
from engine.models.forward_context import AttentionMetadata
from engine.models.interface import EncoderDecoderModel, EngineModel, SupportsMultiModal
from engine.models.lora import StepAdapters
from engine.sampling.logprobs import CHUNK, prompt_logprobs
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import Sampler, SamplerOutput
from engine.sampling.token_bitmask import TokenBitmask
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.alignment import AlignmentRecorder
from engine.worker.compiled_step import CompiledStepRunner
from engine.worker.encoder_runner import EncoderRunner
from engine.worker.hidden_states import HiddenStateStore
from engine.worker.input_batch import InputBatch
from engine.worker.interface import BitmaskInbox, CompletedStep, PendingStep
from engine.worker.sampling_io import bitmask_rows, collect_outputs, draft_by_logits_row
from engine.worker.step_inputs import StepInputs
from kernels.tensors import to_device

#: Number of cached samplers for adapters' vocabularies.
_MAX_CACHED_SAMPLERS = 16


class StepLogits:
    """Logits of a step's hidden states, computed for some rows at a time."""

    def __init__(self, model: EngineModel, hidden: Tensor, heads: StepAdapters) -> None:
        """`heads`: adapters of the output layer, by rows of `hidden`."""
        self._model, self._hidden, self._heads = model, hidden, heads

    def rows(self, start: int, end: int) -> Tensor:
        """Logits of rows [start, end), which share a vocabulary."""
        if not self._heads:
            return self._model.logits(self._hidden[start:end])
        return self._adapted(self._hidden[start:end], self._heads.slice_rows(start, end))

    def compute(self, rows: Sequence[int]) -> Tensor:
        """Logits of these rows, which share a vocabulary."""
        index = torch.tensor(rows)
        hidden = self._hidden[to_device(index, self._hidden.device)]
        if not self._heads:
            return self._model.logits(hidden)
        return self._adapted(hidden, self._heads.lm_head_adapters(index))

    def _adapted(self, hidden: Tensor, heads: StepAdapters) -> Tensor:
        model: Any = self._model  # a model that supports adapters
        logits: Tensor = model.logits(hidden, heads)
        return logits


class PerVocabularySampler:
    """Samples a step's tokens, with one sampler per vocabulary.

    Adapters may add tokens, so their rows' logits have more columns. The rows of each vocabulary
    form a batch of their own, and no row's bits depend on the others.
    """

    def __init__(self, sampler: Sampler) -> None:
        """`sampler`: for the model's vocabulary."""
        self._sampler = sampler
        #: By vocabulary size, least recently used first.
        self._adapter_samplers: OrderedDict[int, Sampler] = OrderedDict()

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
            (vocab_size,) = groups
            sampler = self._get_sampler(vocab_size)
            return sampler.sample(logits.rows(0, len(states)), states, mask, drafts)
        merged = SamplerOutput(torch.empty(len(states), dtype=torch.int64), [None] * len(states))
        for vocab_size, rows in groups.items():
            index_of = {row: index for index, row in enumerate(rows)}
            output = self._get_sampler(vocab_size).sample(
                logits.compute(rows),
                [states[row] for row in rows],
                None if mask is None else mask.of(rows),
                {index_of[row]: draft for row, draft in drafts.items() if row in index_of},
            )
            merged.token_ids[rows] = output.token_ids.cpu()
            for row, scores in zip(rows, output.logprobs, strict=True):
                merged.logprobs[row] = scores
            merged.errors |= {rows[index]: error for index, error in output.errors.items()}
            merged.candidates |= {
                rows[index]: candidates for index, candidates in output.candidates.items()
            }
        return merged

    def _get_sampler(self, vocab_size: int) -> Sampler:
        """The sampler of a vocabulary, which caches the previous step's rows; 0: the model's
        own.
        """
        if not vocab_size:
            return self._sampler
        sampler = self._adapter_samplers.pop(vocab_size, None) or self._sampler.for_vocabulary()
        self._adapter_samplers[vocab_size] = sampler
        while len(self._adapter_samplers) > _MAX_CACHED_SAMPLERS:
            self._adapter_samplers.popitem(last=False)
        return sampler


class DeferredStep:
    """A step whose tokens are sampled once another stage has computed the logits."""

    def __init__(self, choose_tokens: Callable[[], StepResult]) -> None:
        self._choose_tokens = choose_tokens
        self._result: StepResult | None = None

    @torch.inference_mode()
    def finish(self) -> StepResult:
        if self._result is None:  # the logits arrive only once
            self._result = self._choose_tokens()
        return self._result


class ModelRunner:
    """Holds the model, its KV cache and the running batch."""

    #: Whether a forward pass always returns the states of all tokens.
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
        """`decodes`: runs the steps that it supports in one call. `masks`: grammar bitmasks.
        `hidden`: store of the hidden states that draft heads need.
        """
        self.model = model
        self.batch = batch
        self.sampler = sampler
        self._tokens = PerVocabularySampler(sampler)
        #: The model's forward pass; on a GPU it also moves the inputs there.
        self.forward: Callable[[torch.Tensor, AttentionMetadata], torch.Tensor] = model.forward
        self._compiled_step = decodes
        #: Replaces the compiled step's `run` while it is timed.
        self._run_compiled: Callable[[StepPlan], StepResult | None] | None = None
        self._masks = masks or BitmaskInbox()
        self._hidden, self._saves_hidden = hidden, False
        self._taps = self._make_taps(() if hidden is None else hidden.aux_layers)
        self.encoder: EncoderRunner | None = None
        if isinstance(model, SupportsMultiModal | EncoderDecoderModel):
            self.encoder = EncoderRunner(model, batch.adapters.loaded)
        self._alignment_recorder = (
            AlignmentRecorder() if isinstance(model, EncoderDecoderModel) else None
        )
        self._retain_states = getattr(model, "keep", None) if model.stateful else None
        stage = getattr(model, "stage", None)
        #: Whether another stage computes the logits, after this one has launched further steps.
        self._defers_logits = stage is not None and not stage.is_last

    def wrap_forward(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """See `TimesForward`; a compiled step is one call, with its sampling."""
        self.forward = wrap(self.forward)
        if self._compiled_step is not None:
            self._run_compiled = wrap(self._compiled_step.run)

    def _make_taps(self, layers: tuple[int, ...]) -> AuxHiddenStates | None:
        return AuxHiddenStates(layers) if layers else None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: inputs, forward, logits, sampling."""
        compiled_step = self._compiled_step
        if compiled_step is None or plan.encode or plan.dropped_encodings:
            return self.run(plan, self.prepare(plan))
        self._begin(plan)
        compiled_step.keeps = self._saves_hidden
        result = (self._run_compiled or compiled_step.run)(plan)
        return self.run(plan, self._inputs(plan)) if result is None else result

    def prepare(self, plan: StepPlan) -> StepInputs | None:
        """The step's inputs, without the tokens that the previous step samples. None: no sequences.

        The plan's changes are applied to the batch here, so a step that fails later is undone by
        removing its sequences.
        """
        self._begin(plan)
        return self._inputs(plan)

    def _begin(self, plan: StepPlan) -> None:
        """Apply the plan's changes, and decide whether its hidden states are saved."""
        self.batch.apply_plan(plan)
        if self._alignment_recorder is not None:
            self._alignment_recorder.apply_plan(plan)
        if self._hidden is not None:
            self._saves_hidden = self._hidden.begin(plan)

    def _inputs(self, plan: StepPlan) -> StepInputs | None:
        """Like `prepare`, after the plan's changes were applied."""
        if not plan.seq_ids:
            return None
        inputs = self.batch.prepare_inputs(plan)
        if self._retain_states is not None:
            inputs.occupied_rows = set(self.batch.row_of.values())
        return inputs

    @torch.inference_mode()
    def run(self, plan: StepPlan, inputs: StepInputs | None) -> StepResult:
        """Run a prepared step after the previous one. May be called from another thread."""
        if inputs is None:
            return StepResult.empty(0)
        alignments = (
            {} if self._alignment_recorder is None else self._alignment_recorder.begin(plan, inputs)
        )
        result = self._choose_tokens(plan, inputs, *self._compute_states(plan, inputs))
        if self._alignment_recorder is not None:
            self._alignment_recorder.finish(plan, alignments, result)
        return result

    def _compute_states(self, plan: StepPlan, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Hidden states for the logits, and those to save."""
        if self._retain_states is not None:
            self._retain_states(inputs.occupied_rows)
        self._encode(plan, inputs)
        return self._hidden_states(inputs)

    def _encode(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Run the encoder, if there is one, and look up the vectors of the step's tokens."""
        if self.encoder is not None:
            inputs.context.encoder_embeds = self.encoder.run(
                plan.dropped_encodings, inputs.encode, inputs.encoder_ranges
            )

    def _choose_tokens(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, saved: Tensor
    ) -> StepResult:
        """Compute logits, and sample tokens from them."""
        result = StepResult.empty(len(plan.seq_ids))
        if len(hidden):
            logits = self._logits_of(inputs, hidden)
            if inputs.states:
                self._sample(plan, inputs, logits, result)
            self._score_prompts(plan, inputs, logits, result)
        if self._hidden is not None and self._saves_hidden:
            self._hidden.save(plan, inputs, saved, result)
        return result

    def _hidden_states(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states for the logits, and those to save."""
        tokens, context, store = self.batch.token_ids(inputs), inputs.context, self._hidden
        if context.alignments:
            hidden = self._forward_all(tokens, context)
            return hidden, hidden
        if (
            store is None
            or not store.needs_all_tokens
            or not (self._saves_hidden or self._returns_all)
        ):
            hidden = self.forward(tokens, context)
            # The next step overwrites a graph's output.
            copies = self._saves_hidden and self._returns_all
            return hidden, hidden.clone() if copies else hidden
        logits_rows, saved_tokens = context.logits_rows, store.tokens(inputs)
        if store.aux_layers and not self._returns_all:
            # Inputs of earlier layers: the last layer computes no additional tokens.
            hidden, aux = self._forward_with_aux(tokens, context)
            return hidden, aux[saved_tokens]
        computed = self._rows_to_compute(logits_rows, saved_tokens, len(tokens))
        context.logits_rows = None if computed is None else torch.from_numpy(computed)
        if store.aux_layers:
            hidden, aux = self._forward_with_aux(tokens, context)
        else:
            hidden = aux = self.forward(tokens, context)
        context.logits_rows = logits_rows
        saved = _select_rows(aux, computed, saved_tokens)
        if logits_rows is not None:
            hidden = _select_rows(hidden, computed, logits_rows.numpy())
        return hidden, saved

    def _forward_all(self, tokens: torch.Tensor, context: AttentionMetadata) -> torch.Tensor:
        """The hidden states of `context.logits_rows`, all tokens being computed in all layers."""
        logits_rows, context.logits_rows = context.logits_rows, None
        hidden = self.forward(tokens, context)
        context.logits_rows = logits_rows
        return hidden if logits_rows is None else hidden[logits_rows]

    def _rows_to_compute(
        self, logits_rows: torch.Tensor | None, saved: np.ndarray, count: int
    ) -> np.ndarray | None:
        """Indices of the step's `count` tokens that the last layer must compute, ascending:
        `logits_rows` (None: all) and those to save. None: all.
        """
        if logits_rows is None or self._returns_all:
            return None
        tokens = np.union1d(logits_rows.numpy(), saved)
        return None if len(tokens) == count else tokens

    def _forward_with_aux(
        self, tokens: torch.Tensor, context: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states of all tokens, and the auxiliary ones that the store needs."""
        model, taps = cast(NativeDecoder, self.model), self._taps
        if taps is None:
            raise RuntimeError("The store of hidden states has no auxiliary layers.")
        taps.clear()
        return model.forward(tokens, context, taps), taps.states()

    def _logits_of(self, inputs: StepInputs, hidden: torch.Tensor) -> StepLogits:
        """Logits of the step's hidden states."""
        context = inputs.context
        return StepLogits(
            self.model, hidden, context.adapters.lm_head_adapters(context.logits_rows)
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan, inputs: Any) -> PendingStep:
        if not self._defers_logits or inputs is None:
            return CompletedStep(self.run(plan, inputs))
        states = self._compute_states(plan, inputs)
        return DeferredStep(partial(self._choose_tokens, plan, inputs, *states))

    def reset(self) -> None:
        """Do nothing: no step is in flight after one has failed."""

    def _sample(
        self, plan: StepPlan, inputs: StepInputs, logits: StepLogits, result: StepResult
    ) -> None:
        mask = bitmask_rows(plan, inputs, self._masks)
        output = self._tokens.sample(logits, inputs.states, mask, draft_by_logits_row(inputs))
        collect_outputs(self.batch, plan, inputs, output, result)

    def _score_prompts(
        self, plan: StepPlan, inputs: StepInputs, logits_of: StepLogits, result: StepResult
    ) -> None:
        """Compute the requested log probabilities of prompt tokens.

        Computed for some rows at a time: the logits of all prompt tokens may not fit into memory.
        """
        offset = len(inputs.states)
        for index, state, first, count in inputs.prompt_logprob_rows:
            following = torch.tensor(state.prompt_token_ids[first : first + count])
            num_logprobs = state.params.prompt_logprobs or 0
            scores: list[TokenLogprobs] = []
            for start in range(0, count, CHUNK):
                end = min(start + CHUNK, count)
                logits = logits_of.rows(offset + start, offset + end)
                ops = self.sampler.ops_for(logits)
                scores += prompt_logprobs(logits, following[start:end], num_logprobs, ops)
            result.prompt_logprobs[plan.seq_ids[index]] = scores
            offset += count


def _select_rows(
    states: torch.Tensor, tokens: np.ndarray | None, selected: np.ndarray
) -> torch.Tensor:
    """A copy of the states of the tokens `selected`, as the next step overwrites a graph's output.

    `states` are those of `tokens`, ascending; None: of all tokens of the step.
    """
    rows = selected if tokens is None else np.searchsorted(tokens, selected)
    return states[to_device(torch.from_numpy(rows), states.device)]
