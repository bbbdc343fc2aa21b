"""`DeviceRunner`: steps on a GPU, of which the next can be begun before the last is known."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch

from engine.models.context import AttentionContext
from engine.models.interface import EngineModel
from engine.models.taps import Taps
from engine.sampling.sampler import Choice, Sampler
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.batch import RunningBatch, StepInputs
from engine.worker.collect import collect, masked_rows
from engine.worker.cuda.adapter_heads import DeviceLogits, HeadRows
from engine.worker.cuda.forward import DeviceForward
from engine.worker.cuda.inputs import Feed
from engine.worker.cuda.staging import Download, copies
from engine.worker.grammar_inbox import GrammarInbox
from engine.worker.hidden import HiddenKeeper
from engine.worker.interface import Finished
from engine.worker.runner import ModelRunner
from engine.worker.step_logits import StepLogits


@dataclass(slots=True)
class DeviceInputs(StepInputs):
    """What a step on a device needs besides.

    Attributes:
        source: int64 [num_tokens]: the row whose last token, as it was sampled, each of the step's
            tokens is; -1 where it's another one.
        lengths: int64 [len(sampled)]: tokens that each has generated before this step's.
    """

    source: np.ndarray = None  # type: ignore[assignment]
    lengths: np.ndarray = None  # type: ignore[assignment]


class Pending:
    """A step that was launched. `finish` waits for its tokens and takes them over, once."""

    def __init__(
        self,
        runner: DeviceRunner,
        plan: StepPlan,
        inputs: StepInputs,
        choice: Choice,
        before: Pending | None,
    ) -> None:
        self._runner, self._plan, self._inputs, self._choice = runner, plan, inputs, choice
        self._download = Download(choice.tensors, runner.copies)
        self._before = before
        self._lock = threading.Lock()
        self._result: StepResult | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether its tokens have been taken over."""
        return self._result is not None

    def finish(self) -> StepResult:
        """The step's result. May be called in any thread; raises what the device ran into."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._result is None:
                try:
                    self._result = self._take()
                except Exception as error:
                    self._error = error
                    raise
            return self._result

    def _take(self) -> StepResult:
        if self._before is not None:
            self._before.finish()
            self._before = None
        result = StepResult.empty(len(self._plan.seq_ids))
        if self._inputs.sampled:
            output = self._choice.settle(self._download.wait())
            collect(self._runner.batch, self._plan, self._inputs, output, result)
        return result


class DeviceRunner(ModelRunner):
    """`ModelRunner` whose steps follow each other on the device without a word from the host.

    A sampled token stays on the device, where the next step's inputs take it from; its copy comes
    to the host beside that step. The host only waits for the step before where the next one's
    choice depends on the text so far: penalties, bad words, `min_tokens`, grammars; and for beams,
    logits processors, prompt logprobs, drafts and adapters that bring tokens, which are run step by
    step.
    """

    _gives_all = True

    def __init__(
        self, model: EngineModel, batch: RunningBatch, sampler: Sampler, forward: DeviceForward,
        device: torch.device, masks: GrammarInbox | None = None, hidden: HiddenKeeper | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, batch, sampler, masks=masks, hidden=hidden)
        self.forward = self._forward = forward
        self.copies, self._device = copies(device), device
        rows = len(batch.num_tokens)
        self._sampled = torch.zeros(rows, dtype=torch.int64, device=device)
        #: Where in its sequence each row's entry of `_sampled` stands; -1: nowhere.
        self._stands_at = np.full(rows, -1, dtype=np.int64)
        self._last: Pending | None = None

    def prepare(self, plan: StepPlan) -> DeviceInputs | None:
        """See `ModelRunner.prepare`."""
        inputs = super().prepare(plan)
        if inputs is None:
            return None
        for sequence in plan.new:
            self._stands_at[self.batch.row_of[sequence.seq_id]] = -1
        owner, positions = inputs.places
        source = np.where(self._stands_at[owner] == positions, owner, -1)
        rows, ends = inputs.targets
        self._stands_at[rows] = np.where(self.batch.grows[rows], ends, -1)
        lengths = ends - self.batch.num_prompt[rows]
        fields = {name: getattr(inputs, name) for name in StepInputs.__dataclass_fields__}
        return DeviceInputs(**fields, source=source, lengths=lengths)

    def _make_taps(self, layers: tuple[int, ...]) -> Taps | None:
        """None: the forward pass has its own, see `TappedForward`."""
        return None

    def _tapped(
        self, tokens: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ModelRunner._tapped`; views of what the step's graph writes."""
        both, size = self.forward(tokens, context), self.model.spec.hidden_size
        return both[:, :size], both[:, size:]

    def run(self, plan: StepPlan, inputs: StepInputs | None) -> StepResult:
        """See `ModelRunner.run`."""
        return self.launch(plan, inputs).finish()

    def forget(self) -> None:
        """Nothing follows the last step: it failed."""
        self._last = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan, inputs: StepInputs | None) -> Pending | Finished:
        """Give the device a prepared step, after the one before."""
        before, self._last = self._last, None
        if not isinstance(inputs, DeviceInputs):
            return Finished(StepResult.empty(0))
        kept = self._keep is not None or self._hidden is not None
        if kept or _step_by_step(inputs, self.sampler):
            if before is not None:
                before.finish()
            return Finished(super().run(plan, inputs))
        pending = self._launch(plan, inputs, before)
        self._last = pending
        return pending

    def _logits_of(self, inputs: StepInputs, hidden: torch.Tensor) -> StepLogits:
        """See `ModelRunner._logits_of`."""
        return DeviceLogits(self.model, hidden, inputs.context, self._device)

    def _launch(self, plan: StepPlan, inputs: DeviceInputs, before: Pending | None) -> Pending:
        feed = None
        if before is not None and not before.done and (inputs.source >= 0).any():
            feed = Feed(inputs.source, self._sampled)
        rows = inputs.targets[0]
        heads = HeadRows.of(self.model, inputs.context)
        more = (rows, *heads.arrays)
        key, staged = self._forward.stage(
            self.batch.token_ids(inputs), inputs.context, feed, more=more
        )
        hidden = self._forward.run(key, staged)
        if not inputs.sampled:
            empty = torch.empty(0, dtype=torch.int64)
            return Pending(self, plan, inputs, Choice(empty), before)
        logits = heads.logits(hidden, staged.more[1:])
        waits = plan.awaits_masks or self.sampler.waits(logits, inputs.states)
        if waits and before is not None:
            before.finish()
        mask = masked_rows(plan, inputs, self._masks)
        choice = self.sampler.choose(logits, inputs.states, mask, inputs.lengths)
        # One that is no token fails its sequence; until then the next step has to read something.
        self._sampled.index_copy_(0, staged.more[0], choice.token_ids.clamp(min=0))
        return Pending(self, plan, inputs, choice, before)


def _step_by_step(inputs: StepInputs, sampler: Sampler) -> bool:
    """Whether the host has to look at the step before it can go on."""
    own = any(state.vocab_size for state in inputs.states)
    seen = sampler.goes_step_by_step(inputs.states)
    return bool(inputs.prompt_rows or inputs.drafted) or own or seen
