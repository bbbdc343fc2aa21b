"""Steps of tt-metal's models: rows of a plan as their inputs, and their outputs as tokens."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.contract.sampling_params import SamplingParams
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.models.decoder_spec import DecoderSpec
from engine.multimodal.inputs import MediaTensors
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import Sampler, SamplerOutput
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.input_batch import InputBatch
from engine.worker.interface import BitmaskInbox, CompletedStep, PendingStep
from engine.worker.sampling_io import bitmask_rows, collect_outputs
from engine.worker.step_inputs import StepInputs

StepImages = list[list[dict[str, Any] | None] | None]

#: Parameters that change what is sampled and that `TTSamplingParams` lacks.
_HOST_PARAMETERS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "min_tokens",
    "logprobs",
    "logprob_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words_token_ids",
    "structured_outputs",
    "logits_processors",
    "use_beam_search",
    "thinking",
)
_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class TTSettings:
    """How a model is called.

    Attributes:
        max_batch_size: rows of all data-parallel groups.
        num_groups: of chips; each has the whole model and a share of the rows.
        traces_prefill, traces_decode: the device records commands once and replays them.
        samples_prefill, samples_decode: tokens are chosen on the device where it can.
        warms_up: prompts are compiled before the first one comes.
    """

    max_batch_size: int
    num_groups: int
    traces_prefill: bool
    traces_decode: bool
    samples_prefill: bool
    samples_decode: bool
    warms_up: bool

    @property
    def group_size(self) -> int:
        """Rows of a group."""
        return self.max_batch_size // self.num_groups


@dataclass(frozen=True)
class TTSamplingParams:
    """By row of the batch, what the device samples by. `top_k` 0: all tokens."""

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of its parameters; None: any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a model's method with the arguments that it has parameters for.

    Models differ in which of the interface's optional arguments they take.
    """
    # By the plain function: the cache would keep a bound method's model alive.
    names = _parameters(getattr(function, "__func__", function))
    return function(
        **{name: value for name, value in arguments.items() if names is None or name in names}
    )


class TTModel:
    """A model of tt-metal.

    Block 0 of the device's cache belongs to no sequence. Rows that only pad a batch are all zeros,
    so they write to it and read from it; a sequence's block b is the device's block b + 1.
    """

    stateful = False
    decode_bytes = 0

    def __init__(self, model: Any, spec: DecoderSpec, settings: TTSettings) -> None:
        self._model = model
        self.spec, self.settings = spec, settings
        #: Whether a decode returns before the device is done.
        self._reads_later = all(
            hasattr(model, name) for name in ("read_decode_output", "process_decode_output_host")
        )
        self._cache: Any = None
        self._block_size = self._max_num_blocks = 0

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layout: KVCacheConfig | None = None,
    ) -> None:
        spec = self.spec
        self._block_size, self._max_num_blocks = block_size, num_blocks + 1
        self._reserve_cross_blocks()
        shape = (self._max_num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self._cache = self._model.allocate_kv_cache(shape, dtype, spec.num_layers)
        if self.settings.warms_up and hasattr(self._model, "warmup_model_prefill"):
            on_device = [] if not self.settings.samples_prefill else [
                make_sampling_params([params])
                for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0))
            ]  # fmt: skip
            self._model.warmup_model_prefill(
                kv_cache=self._cache,
                enable_trace=self.settings.traces_prefill,
                sampling_params=[*on_device, None],
            )

    def _reserve_cross_blocks(self) -> None:
        """Add blocks of the cache that no sequence gets; without cross attention there are none."""

    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        num_cached: np.ndarray,
        tables: np.ndarray,
        slots: list[int],
        sampling: TTSamplingParams | None,
        **media: Any,
    ) -> Any:
        """The device's output for whole prompts: [rows, 1, vocabulary] logits, or [rows] tokens.

        Args:
            prompts: by row, all its token ids.
            num_cached: int [rows], tokens of prompts whose keys and values are cached.
            tables: int32 [rows, blocks], the sequences' blocks.
            slots: positions of the rows in the batch of all groups.
            media: `pixel_values` and `image_grid_thw`, by row a tensor for each image, or None.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.from_numpy(prompt)
        num_blocks = -(-lengths // self._block_size)
        pages = self._pages(np.arange(len(prompts)), tables, num_blocks, (len(prompts), -1))
        if num_cached.any():
            media["start_pos"] = num_cached.tolist()
        return call(
            self._model.prefill_forward,
            tokens=tokens,
            page_table=pages,
            kv_cache=self._cache,
            prompt_lens=torch.from_numpy(lengths.astype(np.int32)),
            sampling_params=sampling,
            empty_slots=slots,
            enable_trace=self.settings.traces_prefill,
            **media,
        )

    def decode(
        self,
        rows: np.ndarray,
        token_ids: np.ndarray,
        positions: np.ndarray,
        tables: np.ndarray,
        slots: list[int],
        sampling: TTSamplingParams | None,
    ) -> Any:
        """The device's output for one token a sequence, to be read by `read`.

        All shapes are constant: a trace is recorded for one shape.

        Args:
            rows: int [sequences], in the batch.
            token_ids, positions: int [sequences].
            tables: int32 [sequences, blocks].
            slots: see `prefill`.
        """
        size = self.settings.max_batch_size
        tokens = torch.zeros(size, 1, dtype=torch.int32)
        tokens[rows, 0] = torch.from_numpy(token_ids.astype(np.int32))
        start_pos = torch.zeros(size, dtype=torch.int32)
        start_pos[rows] = torch.from_numpy(positions.astype(np.int32))
        num_blocks = positions // self._block_size + 1
        return self._model.decode_forward(
            tokens=tokens,
            start_pos=start_pos,
            page_table=self._pages(rows, tables, num_blocks, (size, self._max_num_blocks)),
            kv_cache=self._cache,
            enable_trace=self.settings.traces_decode,
            read_from_device=not self._reads_later,
            sampling_params=sampling,
            **self._cross_arguments(rows, slots),
        )

    def _cross_arguments(self, rows: np.ndarray, slots: list[int]) -> dict[str, Any]:
        """Further arguments of a decode of `rows` of the batch."""
        return {}

    def _pages(
        self, rows: np.ndarray, tables: np.ndarray, num_blocks: np.ndarray, shape: tuple[int, int]
    ) -> Tensor:
        """A page table of a shape, -1: as wide as needed; zero after a sequence's last block."""
        width = int(num_blocks.max())
        pages = np.zeros((shape[0], width if shape[1] < 0 else shape[1]), dtype=np.int32)
        is_used = np.arange(width) < num_blocks[:, None]
        pages[rows, :width] = np.where(is_used, tables[:, :width] + 1, 0)
        return torch.from_numpy(pages)

    def read(self, output: Any, *, is_decode: bool, are_tokens: bool) -> Tensor:
        """A step's output on the host, by row of its batch: int64 [rows] tokens, or float32 [rows,
        vocabulary] logits. Waits for the device.
        """
        if is_decode and self._reads_later:
            output = self._model.process_decode_output_host(
                self._model.read_decode_output(output, async_read=False), is_tokens=are_tokens
            )
        if are_tokens:
            return output.reshape(-1).long()
        return output.reshape(len(output), -1)[:, : self.spec.vocab_size].float()


class TTVisionModel(TTModel):
    """A model whose `prefill_forward` takes pictures and runs the vision tower itself."""

    def encode(self, kind: str, tensors: MediaTensors) -> dict[str, Any]:
        """A picture as `prefill_forward` takes it."""
        return {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}


class TTCrossModel(TTVisionModel):
    """A model whose text attends to a picture by cross attention: an encoder and a decoder.

    A slot of the batch has blocks of its own for the picture's keys and values, after those of the
    sequences. What a prompt's step returns beside its logits goes into the sequence's decodes.
    """

    def __init__(self, model: Any, spec: DecoderSpec, settings: TTSettings) -> None:
        super().__init__(model, spec, settings)
        #: [slots, blocks of a picture].
        self._cross_pages = np.zeros((0, 0), dtype=np.int32)
        #: By slot, cross_attention_masks and full_text_row_masked_out_mask.
        self._masks: list[tuple[Any, Any]] = [(None, None)] * settings.max_batch_size

    def encode(self, kind: str, tensors: MediaTensors) -> dict[str, Any]:
        from PIL import Image

        (pixels,) = tensors["pixel_values"]
        return {"images": Image.fromarray(pixels.astype(np.uint8))}

    def _reserve_cross_blocks(self) -> None:
        num_slots = self.settings.max_batch_size
        width = -(-self._model.max_cross_attn_tokens // self._block_size)
        pages = self._max_num_blocks + np.arange(num_slots * width, dtype=np.int32)
        self._cross_pages = pages.reshape(num_slots, width)
        self._max_num_blocks += num_slots * width

    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        num_cached: np.ndarray,
        tables: np.ndarray,
        slots: list[int],
        sampling: TTSamplingParams | None,
        **media: Any,
    ) -> Any:
        pages = torch.from_numpy(self._cross_pages[slots])
        media = {"images": [None] * len(prompts), **media, "cross_page_table": pages}
        output, *masks = super().prefill(prompts, num_cached, tables, slots, sampling, **media)
        for slot, *entry in zip(slots, *masks, strict=True):
            self._masks[slot] = (entry[0], entry[1])
        return output

    def _cross_arguments(self, rows: np.ndarray, slots: list[int]) -> dict[str, Any]:
        size = self.settings.max_batch_size
        pages = np.zeros((size, self._cross_pages.shape[1]), dtype=np.int32)
        pages[rows] = self._cross_pages[slots]
        masks: list[tuple[Any, Any]] = [(None, None)] * size
        for row, slot in zip(rows.tolist(), slots, strict=True):
            masks[row] = self._masks[slot]
        return {
            "cross_page_table": torch.from_numpy(pages),
            "cross_attention_masks": [mask for mask, _ in masks],
            "full_text_row_masked_out_mask": [mask for _, mask in masks],
        }


def make_sampling_params(params: Sequence[SamplingParams]) -> TTSamplingParams:
    """Parameters of a batch's rows."""
    return TTSamplingParams(
        [entry.temperature for entry in params],
        [max(0, entry.top_k) for entry in params],
        [entry.top_p for entry in params],
    )


class DataParallelSlots:
    """Positions of sequences in the batch of all groups.

    A sequence stays in its group, whose chips have its keys and values.
    """

    def __init__(self, num_groups: int, group_size: int) -> None:
        self._group_size = group_size
        self._free = [
            list(reversed(range(group * group_size, (group + 1) * group_size)))
            for group in range(num_groups)
        ]
        self._slot_of: dict[int, int] = {}

    def assign(self, seq_id: int) -> None:
        """Give a new sequence a slot of the group with the fewest sequences."""
        self._slot_of[seq_id] = max(self._free, key=len).pop()

    def release(self, seq_id: int) -> None:
        """Free the slot of a sequence; does nothing for one without."""
        slot = self._slot_of.pop(seq_id, None)
        if slot is not None:
            self._free[slot // self._group_size].append(slot)

    def slots(self, seq_ids: Sequence[int]) -> np.ndarray:
        """Int [sequences]."""
        return np.array([self._slot_of[seq_id] for seq_id in seq_ids])

    def decode_rows(self, slots: np.ndarray) -> np.ndarray:
        """Rows of sequences in a decode's batch: those of a group follow each other from its first
        row on, and padding comes after them.
        """
        if len(self._free) == 1:
            return np.arange(len(slots))
        order = np.argsort(slots, kind="stable")
        groups = slots[order] // self._group_size
        rows = np.empty(len(slots), dtype=np.int64)
        index_in_group = np.arange(len(slots)) - np.searchsorted(groups, groups)
        rows[order] = groups * self._group_size + index_in_group
        return rows


@dataclass(slots=True)
class TTInputs:
    """A step's inputs.

    Attributes:
        slots: int [sequences], see `DataParallelSlots`.
        images: by sequence, its pictures' tensors by name, None for a cached one, or None; None: no
            sequence has any.
    """

    step: StepInputs
    slots: np.ndarray
    images: StepImages | None


class LaunchedStep:
    """A step that the device computes. `finish` may be called in two threads at once."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self._finish, self._lock = finish, threading.Lock()
        self._result: StepResult | None = None

    @torch.inference_mode()
    def finish(self) -> StepResult:
        with self._lock:
            if self._result is None:
                self._result = self._finish()
            return self._result


class TTRunner:
    """Runs steps that hold prompts or decodes. A step's tokens are inputs of the next one, which
    therefore waits for them; planning and detokenization go on while the device computes.
    """

    def __init__(
        self,
        model: TTModel | TTVisionModel,
        batch: InputBatch,
        sampler: Sampler,
        masks: BitmaskInbox,
    ) -> None:
        self._model, self._batch, self._sampler, self._masks = model, batch, sampler, masks
        settings = model.settings
        self._slots = DataParallelSlots(settings.num_groups, settings.group_size)
        #: Pictures by their keys in the scheduler's encoder cache.
        self._images: dict[bytes, dict[str, Any]] = {}
        self._launched: LaunchedStep | None = None
        #: The states, rows and size of the batch that the device sampled last, and by what.
        self._sampling: tuple[Any, TTSamplingParams | None] = None, None

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan, self.prepare(plan)).finish()

    def prepare(self, plan: StepPlan) -> TTInputs | None:
        for seq_id in plan.removed:
            self._slots.release(seq_id)
        self._batch.apply_plan(plan)
        for sequence in plan.new:
            self._slots.assign(sequence.seq_id)
        for key in plan.dropped_encodings:
            self._images.pop(key, None)
        if not plan.seq_ids:
            return None
        step = self._batch.prepare_inputs(plan)
        for task, tensors in step.encode:
            self._images[task.key] = self._model.encode(task.kind, tensors)  # type: ignore[union-attr]
        return TTInputs(step, self._slots.slots(plan.seq_ids), self._images_of(step))

    def _images_of(self, step: StepInputs) -> StepImages | None:
        if not self._batch.encoder_inputs or not step.encoder_ranges:
            return None
        rows = step.context.sequence_rows.tolist()  # type: ignore[union-attr]
        keys = [
            dict.fromkeys(entry.key for entry in self._batch.encoder_inputs.get(row, ()))
            for row in rows
        ]
        return [[self._images.get(key) for key in entry] if entry else None for entry in keys]

    def reset(self) -> None:
        self._launched = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan, inputs: Any) -> PendingStep:
        if inputs is None:
            return CompletedStep(StepResult.empty(0))
        if self._launched is not None:
            self._launched.finish()
        step: StepInputs = inputs.step
        if step.prompt_logprob_rows:
            raise InvalidRequest(
                "A Tenstorrent model has logits of a sequence's last token only: prompt_logprobs "
                "aren't available.",
                param="prompt_logprobs",
            )
        context, slots = step.context, inputs.slots
        lengths = context.seq_lens.numpy()
        counts = np.diff(context.query_start_loc.numpy())
        num_cached = lengths - counts
        tables = context.block_tables.numpy()
        is_decode = bool((counts == 1).all() and (num_cached > 0).all())
        if is_decode:
            rows = self._slots.decode_rows(slots)
            sampling = self._device_sampling(plan, step, rows, is_decode=True)
            token_ids = self._batch.token_ids(step).numpy()
            output = self._model.decode(
                rows, token_ids, num_cached, tables, slots.tolist(), sampling
            )
        else:
            rows = np.arange(len(counts))
            sampling = self._device_sampling(plan, step, rows, is_decode=False)
            indices = context.sequence_rows.tolist()  # type: ignore[union-attr]
            prompts = [
                self._batch.tokens[row, :length]
                for row, length in zip(indices, lengths.tolist(), strict=True)
            ]
            media = {} if inputs.images is None else _by_name(inputs.images)
            output = self._model.prefill(
                prompts, num_cached, tables, slots.tolist(), sampling, **media
            )

        def finish() -> StepResult:
            are_tokens = sampling is not None
            values = self._model.read(output, is_decode=is_decode, are_tokens=are_tokens)
            values = values[torch.from_numpy(rows[step.sampled])]
            if are_tokens:
                sampled = SamplerOutput(values, [None] * len(values))
            else:
                mask = bitmask_rows(plan, step, self._masks)
                sampled = self._sampler.sample(values, step.states, mask, {})
            result = StepResult.empty(len(plan.seq_ids))
            collect_outputs(self._batch, plan, step, sampled, result)
            return result

        self._launched = LaunchedStep(finish)
        return self._launched

    def _device_sampling(
        self, plan: StepPlan, step: StepInputs, rows: np.ndarray, *, is_decode: bool
    ) -> TTSamplingParams | None:
        """What the device samples by; None: the host samples, since a row's parameters ask for it,
        or the settings do.
        """
        settings = self._model.settings
        if not (settings.samples_decode if is_decode else settings.samples_prefill):
            return None
        if plan.awaits_bitmask or len(step.sampled) < len(rows):
            return None
        num_rows = settings.max_batch_size if is_decode else len(rows)
        # Decodes have the same sequences from step to step, mostly.
        batch = (step.states, rows.tolist(), num_rows)
        if batch != self._sampling[0]:
            self._sampling = batch, _sampling_params(*batch)
        return self._sampling[1]


def _sampling_params(
    states: list[RequestSamplingState], rows: list[int], num_rows: int
) -> TTSamplingParams | None:
    """Of sequences in some of a batch's rows; None: the host must sample."""
    if not all(can_sample_on_device(state) for state in states):
        return None
    params = [SamplingParams(temperature=0.0)] * num_rows
    for row, state in zip(rows, states, strict=True):
        params[row] = state.params
    return make_sampling_params(params)


def _by_name(images: StepImages) -> dict[str, Any]:
    """Pictures by the name of each of their tensors: by row a list of tensors, or None."""
    names = dict.fromkeys(name for row in images for image in row or () for name in image or ())
    return {
        name: [
            None if row is None else [image and image.get(name) for image in row] for row in images
        ]
        for name in names
    }


def can_sample_on_device(state: RequestSamplingState) -> bool:
    """Whether temperature, top_k and top_p are all that a sequence is sampled by."""
    return all(getattr(state.params, name) == getattr(_DEFAULTS, name) for name in _HOST_PARAMETERS)
