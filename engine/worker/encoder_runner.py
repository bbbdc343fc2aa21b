"""`EncoderRunner`: runs a model's encoder, and keeps its outputs while the plans need them.
`EncodingRunner`: steps of a replica that has no decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.kv_transfer.ec_connector import ECConnector
from engine.models.interface import EncoderDecoderModel, SupportsMultiModal
from engine.models.lora import AdapterWeights
from engine.models.vision.family import VisionDecoder
from engine.multimodal.inputs import MediaTensors
from engine.multimodal.pruning import RETAINED
from engine.scheduler.plan import EncodeTask, StepPlan, StepResult
from engine.worker.interface import Attachments, CompletedStep
from engine.worker.step_inputs import EncoderRange
from kernels.tensors import to_device


class EncoderRunner:
    """The worker's side of `engine.scheduler.encoder_cache`."""

    def __init__(
        self,
        model: SupportsMultiModal | EncoderDecoderModel,
        adapters: Mapping[str, AdapterWeights],
    ) -> None:
        """`adapters`: by digest."""
        self._model, self._adapters = model, adapters
        #: Saves outputs for other replicas, and loads theirs; None: nothing does.
        self.ec_connector: ECConnector | None = None
        #: key -> [num_vectors, hidden]
        self._outputs: dict[bytes, Tensor] = {}

    def run(
        self,
        dropped: Sequence[bytes],
        encode: Sequence[tuple[EncodeTask, MediaTensors]],
        ranges: Sequence[EncoderRange],
    ) -> tuple[Tensor, Tensor] | None:
        """Free outputs, compute new ones, and gather the vectors of a step's tokens.

        Each picture is computed separately, so that its bits don't depend on others in the step.

        Returns:
            Indices of the step's tokens, int64 [n], and their vectors [n, hidden]; None: no token
            has one.
        """
        for key in dropped:
            self._outputs.pop(key, None)
        for task, tensors in encode:
            if isinstance(self._model, EncoderDecoderModel):
                adapter = self._adapters[task.adapter] if task.adapter else None
                self._model.encode_to_cache(tensors, task.block_ids, adapter)
            else:
                self._outputs[task.key] = self._encode(self._model, task, tensors)
        if not ranges:
            return None
        indices = [torch.arange(entry.start, entry.end) for entry in ranges]
        vectors = [
            self._outputs[entry.key][entry.offset :][: entry.end - entry.start] for entry in ranges
        ]
        return torch.cat(indices), torch.cat(vectors)

    def _encode(self, model: SupportsMultiModal, task: EncodeTask, tensors: MediaTensors) -> Tensor:
        """An item's output, loaded or computed."""
        connector = self.ec_connector
        if connector is None:
            return self._compute(model, task, tensors)
        if (output := connector.start_load_caches(task.key)) is None:
            output = self._compute(model, task, tensors)
            connector.save_caches(task.key, output, task.tenant, task.cache_namespace)
        return output

    def _compute(
        self, model: SupportsMultiModal, task: EncodeTask, tensors: MediaTensors
    ) -> Tensor:
        """An item's output, with the adapter that changes the encoder, without what is pruned."""
        if (retained := tensors.get(RETAINED)) is not None:
            tensors = {name: values for name, values in tensors.items() if name != RETAINED}
        if task.adapter and isinstance(model, VisionDecoder):
            deltas = self._adapters[task.adapter].vision
            output = model.encode_with_adapter(task.kind, tensors, deltas)
        else:
            output = model.encode(task.kind, tensors)
        if retained is None:
            return output
        return output[to_device(torch.from_numpy(retained.copy()), output.device)]


class EncodingRunner:
    """A `Runner` of a replica that only encodes for others: each sequence's token is 0."""

    def __init__(self, encoder: EncoderRunner, attachments: Attachments) -> None:
        self._encoder, self._attachments = encoder, attachments

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan, self.prepare(plan)).finish()

    def prepare(self, plan: StepPlan) -> list[tuple[EncodeTask, MediaTensors]] | None:
        """The step's media; None: no sequences."""
        if not plan.seq_ids:
            return None
        return [(task, self._attachments.get(task.handle)) for task in plan.encode]

    def launch(
        self, plan: StepPlan, inputs: list[tuple[EncodeTask, MediaTensors]] | None
    ) -> CompletedStep:
        if inputs is None:
            return CompletedStep(StepResult.empty(0))
        self._encoder.run(plan.dropped_encodings, inputs, ())
        return CompletedStep(StepResult([[0] * count for count in plan.num_samples]))

    def reset(self) -> None:
        """Do nothing: no step is in flight after one has failed."""
