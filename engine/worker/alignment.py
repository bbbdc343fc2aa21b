"""`AlignmentRecorder`: records attention to audio for prompts to be aligned, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.contract.pooling_params import ALIGN, PoolingParams
from engine.models.forward_context import AlignmentRange
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.step_inputs import StepInputs


@dataclass(slots=True)
class _PromptAlignment:
    """Recorded weights of a prompt: [heads, n, num_states] of each chunk."""

    params: PoolingParams
    num_tokens: int
    chunks: list[Tensor] = field(default_factory=list)


class AlignmentRecorder:
    """Records the attention of prompts that are to be aligned."""

    def __init__(self) -> None:
        self._prompts: dict[int, _PromptAlignment] = {}

    def apply_plan(self, plan: StepPlan) -> None:
        """Track sequences as they come and go; those resumed after a preemption start anew."""
        for seq_id in plan.removed:
            self._prompts.pop(seq_id, None)
        for sequence in plan.new:
            params = sequence.pooling
            if params is not None and params.task == ALIGN:
                count = sequence.num_prompt_tokens
                self._prompts[sequence.seq_id] = _PromptAlignment(params, count)

    def begin(self, plan: StepPlan, inputs: StepInputs) -> dict[int, AlignmentRange]:
        """The step's tokens to record, by index in the plan; the model fills in their weights."""
        ranges: dict[int, AlignmentRange] = {}
        if not self._prompts:
            return ranges
        starts, positions = inputs.context.query_start_loc.tolist(), inputs.token_index[1]
        for index, seq_id in enumerate(plan.seq_ids):
            prompt = self._prompts.get(seq_id)
            if prompt is not None:
                params = prompt.params
                skipped = max(0, params.align_from - int(positions[starts[index]]))
                start = min(starts[index] + skipped, starts[index + 1])
                ranges[index] = AlignmentRange(start, starts[index + 1], params.num_states)
        inputs.context.alignments = tuple(r for r in ranges.values() if r.start < r.end)
        for group in inputs.context.other_groups:
            group.alignments = inputs.context.alignments
        return ranges

    def finish(self, plan: StepPlan, ranges: dict[int, AlignmentRange], result: StepResult) -> None:
        """Store what was recorded; `result.pooled` gets the weights of completed prompts.

        They are float32 [heads, tokens from `align_from` on, num_states], little-endian.
        """
        for index, tokens in ranges.items():
            prompt = self._prompts[plan.seq_ids[index]]
            if tokens.weights:
                prompt.chunks.append(torch.cat(tokens.weights))
            if not plan.num_samples[index]:
                continue
            weights = torch.cat(prompt.chunks, dim=1).cpu()
            result.pooled[plan.seq_ids[index]] = weights.numpy().astype("<f4", copy=False).tobytes()
            # No output follows the prompt.
            result.token_ids[index] = []
