"""`PoolingRunner`: runs the steps of a pooling model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.contract.pooling_params import PoolingParams
from engine.models.encoders.encoder import NativeEncoder
from engine.models.forward_context import AttentionMetadata
from engine.models.interface import EngineModel, SupportsMultiModal
from engine.pooling.pooler import Pooler
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.encoder_runner import EncoderRunner
from engine.worker.input_batch import InputBatch
from engine.worker.interface import CompletedStep
from engine.worker.step_inputs import StepInputs
from kernels.tensors import to_device


@dataclass(slots=True)
class PoolingState:
    """The hidden states that pooling a sequence needs; its prompt may come in chunks.

    Attributes:
        pooling_type: "CLS", "LAST" or "MEAN"; unused when `params.by_token`.
        count: number of tokens so far.
    """

    params: PoolingParams
    pooling_type: str
    count: int = 0
    _hidden_states: list[Tensor] = field(default_factory=list)

    @property
    def needs_all(self) -> bool:
        """Whether it needs the hidden state of every token, not only of the last one."""
        return self.params.by_token or self.pooling_type != "LAST"

    def append(self, hidden: Tensor) -> None:
        """Add the hidden states [n, hidden] of the next n tokens (with LAST: of the last)."""
        if self.params.by_token:
            self._hidden_states.append(hidden)
        elif self.pooling_type == "MEAN":
            # In float64, so that the sum doesn't depend on the chunks of the prompt.
            total = hidden.sum(dim=0, dtype=torch.float64)
            self._hidden_states = [self._hidden_states[0] + total if self._hidden_states else total]
        elif self.pooling_type == "LAST":
            self._hidden_states = [hidden[-1]]
        elif self.count == 0:
            self._hidden_states = [hidden[0].clone()]
        self.count += len(hidden)

    def result(self) -> Tensor:
        """float32 [1, hidden], or [num_tokens, hidden] for tasks by token."""
        if self.params.by_token:
            return torch.cat(self._hidden_states).float()
        (pooled,) = self._hidden_states
        if self.pooling_type == "MEAN":
            pooled = pooled / self.count
        return pooled.float()[None]


@dataclass(slots=True)
class PoolingInputs:
    """One step's inputs.

    Attributes:
        batch: the inputs of the model.
        states: pooling states of the plan's sequences.
        every_token: the hidden states of all tokens are needed, not only of the last ones.
    """

    batch: StepInputs
    states: list[PoolingState]
    every_token: bool


class Staging(Protocol):
    """A step's inputs on the model's device."""

    @property
    def token_ids(self) -> Tensor: ...

    @property
    def context(self) -> AttentionMetadata: ...


class PoolingRunner:
    """Holds the model, the running batch and the pooling states."""

    def __init__(
        self,
        model: EngineModel | NativeEncoder,
        batch: InputBatch,
        pooler: Pooler,
        stage: Callable[[Tensor, AttentionMetadata], Staging] | None = None,
    ) -> None:
        """`stage`: moves a step's inputs to the model's device; None: the model is on the host."""
        self.model, self.batch, self.pooler = model, batch, pooler
        self._stage = stage
        self._states: dict[int, PoolingState] = {}
        self._encoder = None
        if isinstance(model, SupportsMultiModal):
            self._encoder = EncoderRunner(model, batch.adapters.loaded)
        self._forward_pass: Callable[..., Tensor] = model.forward

    def wrap_forward(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """See `TimesForward`."""
        self._forward_pass = wrap(self._forward_pass)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: inputs, forward, pooling."""
        return self.run(plan, self.prepare(plan))

    def prepare(self, plan: StepPlan) -> PoolingInputs | None:
        """The step's inputs. None: no sequences.

        The plan's changes are applied to the batch here, so a step that fails later is undone by
        removing its sequences.
        """
        self.batch.apply_plan(plan)
        for seq_id in plan.removed:
            self._states.pop(seq_id, None)
        for sequence in plan.new:  # including those resumed after a preemption: they start anew
            self._states[sequence.seq_id] = PoolingState(
                sequence.pooling or PoolingParams(), self.pooler.settings.pooling_type
            )
        if not plan.seq_ids:
            return None
        states = [self._states[seq_id] for seq_id in plan.seq_ids]
        inputs = self.batch.prepare_inputs(plan)
        every_token = self.pooler.settings.encoder or any(state.needs_all for state in states)
        if every_token:
            inputs.context.logits_rows = None
        return PoolingInputs(inputs, states, every_token)

    @torch.inference_mode()
    def run(self, plan: StepPlan, inputs: PoolingInputs | None) -> StepResult:
        """Run a prepared step after the previous one. May be called from another thread.

        `StepResult.pooled` holds the sequences whose prompts the step completed.
        """
        result = StepResult.empty(len(plan.seq_ids))
        if inputs is None:
            return result
        starts = inputs.batch.context.query_start_loc.tolist()
        hidden = self._forward(inputs, starts, plan.dropped_encodings)
        done = set(inputs.batch.sampled)
        row = 0
        for index, state in enumerate(inputs.states):
            if inputs.every_token:
                state.append(hidden[starts[index] : starts[index + 1]])
            elif index in done:
                # Only these sequences' last tokens went through all layers.
                state.append(hidden[row : row + 1])
                row += 1
            if index in done:
                self._finish(plan.seq_ids[index], state, result)
        return result

    def launch(self, plan: StepPlan, inputs: PoolingInputs | None) -> CompletedStep:
        return CompletedStep(self.run(plan, inputs))

    def reset(self) -> None:
        """Do nothing: no step is in flight after one has failed."""

    def _forward(
        self, inputs: PoolingInputs, starts: list[int], dropped: Sequence[bytes]
    ) -> Tensor:
        """Hidden states [num_rows, hidden] of the requested rows. `dropped`: encoder outputs to
        free.
        """
        token_ids, context = self.batch.token_ids(inputs.batch), inputs.batch.context
        if self._encoder is not None:
            context.encoder_embeds = self._encoder.run(
                dropped, inputs.batch.encode, inputs.batch.encoder_ranges
            )
        lengths = context.query_start_loc
        if self._stage is not None:
            staged = self._stage(token_ids, context)
            token_ids, context = staged.token_ids, staged.context
        if isinstance(self.model, NativeEncoder):
            types = _token_types(inputs.states, starts)
            types = None if types is None else to_device(types, token_ids.device)
            context = dataclasses.replace(context, query_start_loc=lengths)
            return self._forward_pass(token_ids, context, types)
        return self._forward_pass(token_ids, context)

    def _finish(self, seq_id: int, state: PoolingState, result: StepResult) -> None:
        # Heads run on the host: pooled states and the heads' layers are small.
        head = self.batch.adapters.classifier(self.batch.row_of.get(seq_id, -1))
        output = self.pooler(state.result().cpu(), state.params, head)
        if not bool(torch.isfinite(output).all()):
            result.errors[seq_id] = "the model's output isn't finite"
            return
        result.pooled[seq_id] = to_bytes(output)


def _token_types(states: list[PoolingState], starts: list[int]) -> Tensor | None:
    """int64 [num_tokens], 1 from the second part of each pair on; None without pairs."""
    if not any(state.params.second_segment for state in states):
        return None
    types = torch.zeros(starts[-1], dtype=torch.int64)
    for state, start, end in zip(states, starts[:-1], starts[1:], strict=True):
        if second := state.params.second_segment:
            types[start + second : end] = 1
    return types


def to_bytes(output: Tensor) -> bytes:
    """Little-endian float32, row after row."""
    return output.float().numpy().astype(np.dtype("<f4"), copy=False).tobytes()
