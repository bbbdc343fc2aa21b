"""`GpuModelRunner`: steps on a GPU, which can start before the previous one's tokens are known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.contract.speculative_config import SpeculativeConfig
from engine.models.aux_hidden_states import AuxHiddenStates, ForwardWithAux
from engine.models.decoder import NativeDecoder
from engine.models.forward_context import AttentionMetadata
from engine.models.interface import EngineModel
from engine.models.lora import NO_ADAPTERS, DeviceHeads, HeadLora, StepAdapters
from engine.sampling.sampler import PendingSamplerOutput, Sampler
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.gpu.graphs import DeviceForward, Run
from engine.worker.gpu.input_buffers import Download, SampledTokenFeed, copies, send
from engine.worker.hidden_states import HiddenStateStore
from engine.worker.input_batch import InputBatch
from engine.worker.interface import BitmaskInbox, CompletedStep
from engine.worker.model_runner import ModelRunner, StepLogits
from engine.worker.sampling_io import bitmask_rows, collect_outputs
from engine.worker.step_inputs import StepInputs
from kernels.lora import LoraMapping, LoraSlots, SlotTable


class LogitsLoraRows:
    """Adapters of the output layer for `count` rows of logits, all of one vocabulary.

    If adapters have no slots, the model itself applies them, and nothing is sent.

    Attributes:
        arrays: arrays for the device; [] if no row is changed.
    """

    def __init__(self, model: EngineModel, adapters: StepAdapters, count: int) -> None:
        slots: LoraSlots | None = getattr(model, "lora_slots", None)
        self._model: Any = model
        self._changing = adapters if slots is not None else NO_ADAPTERS
        self._replacing_heads: list[HeadLora] = []
        rows: list[np.ndarray] = []
        adding: list[tuple[int, np.ndarray]] = []
        for adapter, adapter_rows in self._changing.groups:
            head, table = adapter.head, adapter.table
            if head is None or not len(adapter_rows):
                continue
            if head.replaces:
                self._replacing_heads.append(head)
                rows.append(adapter_rows.numpy())
            if head.added is not None and isinstance(table, SlotTable):
                adding.append((table.slot, adapter_rows.numpy()))
        self._adds = bool(adding)
        sorted_rows = slots.sort(adding, count, padded=False) if slots and adding else ()
        self.arrays = [*rows, *sorted_rows]

    @classmethod
    def of(cls, model: EngineModel, context: AttentionMetadata) -> LogitsLoraRows:
        """For all logits of a step."""
        rows = context.logits_rows
        count = len(context.positions if rows is None else rows)
        return cls(model, context.adapters.lm_head_adapters(rows), count)

    def logits(self, hidden: Tensor, sent: Sequence[Tensor]) -> Tensor:
        """The rows' logits; `sent`: `arrays` on the device."""
        if not self._changing:
            return self._model.logits(hidden)
        count = len(self._replacing_heads)
        heads = DeviceHeads(
            list(zip(self._replacing_heads, sent[:count], strict=True)),
            LoraMapping(*sent[count:]) if self._adds else None,
            self._changing.vocab_size,
        )
        return self._model.logits(hidden, heads)


class GpuLogits(StepLogits):
    """Logits whose adapter rows are sent to the device range by range."""

    def __init__(
        self, model: EngineModel, hidden: Tensor, context: AttentionMetadata, device: torch.device
    ) -> None:
        super().__init__(model, hidden, context.adapters.lm_head_adapters(context.logits_rows))
        self._device = device

    def _adapted(self, hidden: Tensor, heads: StepAdapters) -> Tensor:
        rows = LogitsLoraRows(self._model, heads, len(hidden))
        return rows.logits(hidden, send(rows.arrays, self._device) if rows.arrays else ())


def query_len(config: EngineConfig) -> int:
    """Number of tokens of a sequence whose drafts a step verifies; 1 without drafts.

    Steps that are planned ahead verify no drafts.
    """
    if not config.speculative_config or config.uses_async_scheduling(True):
        return 1
    return 1 + SpeculativeConfig.from_mapping(config.speculative_config).num_speculative_tokens


def draft_settings(config: EngineConfig, token_budget: int) -> EngineConfig:
    """Settings for recording the graphs of a draft model's steps; `config`: the model's.

    It verifies no drafts: drafting is a decode of one token per sequence, and when it catches up
    with the model's tokens, sequences have different numbers of them. Of the operator's sizes it
    uses those within its token budget, and no graphs if there are none.
    """
    sizes = config.cudagraph_capture_sizes
    if sizes is not None:
        sizes = [size for size in sizes if size <= token_budget]
    eager = config.enforce_eager or sizes == []
    return replace(
        config, speculative_config=None, cudagraph_capture_sizes=sizes or None, enforce_eager=eager
    )


def tapped(model: EngineModel, taps: tuple[int, ...]) -> Run:
    """The model's forward pass, which also returns the inputs of these layers for drafts."""
    return ForwardWithAux(cast(NativeDecoder, model), taps) if taps else model.forward


@dataclass(slots=True)
class GpuStepInputs(StepInputs):
    """A step's additional inputs on a device.

    Attributes:
        source: int64 [num_tokens]: the row whose last sampled token is the step's token; -1 if the
            host knows it.
        lengths: int64 [len(sampled)]: number of tokens that each sequence has generated before.
    """

    source: np.ndarray = None  # type: ignore[assignment]
    lengths: np.ndarray = None  # type: ignore[assignment]


class LaunchedGpuStep:
    """A launched step. `finish` waits for its tokens and writes them to the batch, once."""

    def __init__(
        self,
        runner: GpuModelRunner,
        plan: StepPlan,
        inputs: StepInputs,
        choice: PendingSamplerOutput,
        previous: LaunchedGpuStep | None,
    ) -> None:
        self._runner, self._plan, self._inputs, self._choice = runner, plan, inputs, choice
        self._download = Download(choice.tensors, runner.copies)
        self._previous = previous
        self._lock = threading.Lock()
        self._result: StepResult | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether its tokens have been written to the batch."""
        return self._result is not None

    def finish(self) -> StepResult:
        """The step's result. May be called from any thread; raises the device's error."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._result is None:
                try:
                    self._result = self._collect()
                except Exception as error:
                    self._error = error
                    raise
            return self._result

    def _collect(self) -> StepResult:
        if self._previous is not None:
            self._previous.finish()
            self._previous = None
        result = StepResult.empty(len(self._plan.seq_ids))
        if self._inputs.sampled:
            output = self._choice.finalize(self._download.wait())
            collect_outputs(self._runner.batch, self._plan, self._inputs, output, result)
        return result


class GpuModelRunner(ModelRunner):
    """`ModelRunner` whose steps follow each other without synchronizing with the host.

    A sampled token stays on the device, where the next step's inputs read it; it is copied to the
    host while that step runs. The host waits for the previous step only if the next step's sampling
    depends on the text so far: penalties, bad words, `min_tokens`, grammars; and for beams, logits
    processors, prompt logprobs, drafts and adapters that add tokens, which run step by step.
    """

    _returns_all = True

    def __init__(
        self, model: EngineModel, batch: InputBatch, sampler: Sampler, forward: DeviceForward,
        device: torch.device, masks: BitmaskInbox | None = None, hidden: HiddenStateStore | None =
        None,
    ) -> None:  # fmt: skip
        super().__init__(model, batch, sampler, masks=masks, hidden=hidden)
        self.forward = self._forward = forward
        #: Steps don't overlap while their forward passes are measured.
        self._measures_forward = False
        self.copies, self._device = copies(device), device
        rows = len(batch.num_tokens)
        self._sampled = torch.zeros(rows, dtype=torch.int64, device=device)
        #: Position in its sequence of each row's entry of `_sampled`; -1: none.
        self._stands_at = np.full(rows, -1, dtype=np.int64)
        self._last: LaunchedGpuStep | None = None

    def prepare(self, plan: StepPlan) -> GpuStepInputs | None:
        inputs = super().prepare(plan)
        if inputs is None:
            return None
        for sequence in plan.new:
            self._stands_at[self.batch.row_of[sequence.seq_id]] = -1
        owner, positions = inputs.token_index
        source = np.where(self._stands_at[owner] == positions, owner, -1)
        rows, ends = inputs.target_index
        self._stands_at[rows] = np.where(self.batch.appends_sampled[rows], ends, -1)
        lengths = ends - self.batch.num_prompt[rows]
        fields = {name: getattr(inputs, name) for name in StepInputs.__dataclass_fields__}
        return GpuStepInputs(**fields, source=source, lengths=lengths)

    def _make_taps(self, layers: tuple[int, ...]) -> AuxHiddenStates | None:
        """None: the forward pass computes them, see `ForwardWithAux`."""
        return None

    def _forward_with_aux(
        self, tokens: torch.Tensor, context: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ModelRunner._forward_with_aux`; views of what the step's graph writes."""
        both, size = self.forward(tokens, context), self.model.spec.hidden_size
        return both[:, :size], both[:, size:]

    def run(self, plan: StepPlan, inputs: StepInputs | None) -> StepResult:
        return self.launch(plan, inputs).finish()

    def wrap_forward(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """See `TimesForward`."""
        super().wrap_forward(wrap)
        self._measures_forward = True

    def reset(self) -> None:
        """Forget the last step: it failed."""
        self._last = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan, inputs: StepInputs | None) -> LaunchedGpuStep | CompletedStep:
        """Launch a prepared step on the device, after the previous one."""
        previous, self._last = self._last, None
        if not isinstance(inputs, GpuStepInputs):
            return CompletedStep(StepResult.empty(0))
        saves_states = self._retain_states is not None or self._hidden is not None
        if self._measures_forward or saves_states or _needs_sync(inputs, self.sampler):
            if previous is not None:
                previous.finish()
            return CompletedStep(super().run(plan, inputs))
        pending = self._launch(plan, inputs, previous)
        self._last = pending
        return pending

    def _logits_of(self, inputs: StepInputs, hidden: torch.Tensor) -> StepLogits:
        return GpuLogits(self.model, hidden, inputs.context, self._device)

    def _launch(
        self, plan: StepPlan, inputs: GpuStepInputs, previous: LaunchedGpuStep | None
    ) -> LaunchedGpuStep:
        feed = None
        if previous is not None and not previous.done and (inputs.source >= 0).any():
            feed = SampledTokenFeed(inputs.source, self._sampled)
        self._encode(plan, inputs)
        rows = inputs.target_index[0]
        heads = LogitsLoraRows.of(self.model, inputs.context)
        more = (rows, *heads.arrays)
        key, staged = self._forward.stage(
            self.batch.token_ids(inputs), inputs.context, feed, more=more
        )
        hidden = self._forward.run(key, staged)
        if not inputs.sampled:
            empty = torch.empty(0, dtype=torch.int64)
            return LaunchedGpuStep(self, plan, inputs, PendingSamplerOutput(empty), previous)
        logits = heads.logits(hidden, staged.more[1:])
        waits = plan.awaits_bitmask or self.sampler.needs_host_sync(logits, inputs.states)
        if waits and previous is not None:
            previous.finish()
        mask = bitmask_rows(plan, inputs, self._masks)
        choice = self.sampler.sample_async(logits, inputs.states, mask, inputs.lengths)
        # An invalid token fails its sequence later; until then the next step needs a valid id.
        self._sampled.index_copy_(0, staged.more[0], choice.token_ids.clamp(min=0))
        return LaunchedGpuStep(self, plan, inputs, choice, previous)


def _needs_sync(inputs: StepInputs, sampler: Sampler) -> bool:
    """Whether the host must wait for the step's tokens before it continues."""
    has_adapter_vocab = any(state.vocab_size for state in inputs.states)
    seen = sampler.needs_sync_steps(inputs.states)
    return bool(inputs.prompt_logprob_rows or inputs.drafted) or has_adapter_vocab or seen
