"""`DeviceForward`: a model's forward pass on a GPU, by graph where there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.context import AttentionContext
from engine.worker.cuda.dispatcher import Dispatcher, Key
from engine.worker.cuda.graphs import AttentionBreaks, Recording
from engine.worker.cuda.inputs import StaticInputs, to_device
from engine.worker.cuda.modes import RuntimeMode

log = logging.getLogger(__name__)

Run = Callable[[Tensor, AttentionContext], Tensor]


class DeviceForward:
    """Moves a step's inputs to the device and runs the model, in graphs once they are captured.

    Args:
        run: the model's forward.
        device: where it runs.
        dispatcher, inputs, breaks: None without graphs.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        dispatcher: Dispatcher | None = None,
        inputs: StaticInputs | None = None,
        breaks: AttentionBreaks | None = None,
    ) -> None:
        self._run, self._device = run, device
        self._dispatcher, self._inputs, self._breaks = dispatcher, inputs, breaks
        self._recordings: dict[Key, Recording] = {}

    @torch.inference_mode()
    def capture(self, has_room: Callable[[], bool] = lambda: True) -> int:
        """Record all graphs, largest first, while `has_room`; how many there are then."""
        dispatcher, inputs, breaks = self._dispatcher, self._inputs, self._breaks
        if dispatcher is None or inputs is None or breaks is None:
            return 0
        for key in dispatcher.keys:
            mode, descriptor = key
            if not has_room():
                log.warning(
                    "CUDA graphs: no memory for %d tokens (%s).", *descriptor[:1], mode.name
                )
                dispatcher.drop(key)
                continue
            inputs.rehearse(descriptor)
            token_ids, context = inputs.views(descriptor)
            # Once eagerly: kernels are compiled and workspaces made outside of the recording.
            self._run(token_ids, context)
            self._recordings[key] = breaks.record(
                self._run, token_ids, context, piecewise=mode is RuntimeMode.PIECEWISE
            )
        log.info("CUDA graphs: %d captured, %s", len(self._recordings), dispatcher.mode.name)
        return len(self._recordings)

    def __call__(self, token_ids: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states of `context.logits_rows`; the arguments may be on the CPU."""
        key = self._key(token_ids, context)
        recording = self._recordings.get(key) if key is not None else None
        if recording is None or key is None or self._inputs is None or self._breaks is None:
            moved = token_ids.to(self._device, non_blocking=True)
            return self._run(moved, to_device(context, self._device))
        mode, descriptor = key
        self._inputs.fill(token_ids, context, descriptor)
        if mode is RuntimeMode.PIECEWISE:
            self._breaks.batch = to_device(context, self._device)
        hidden = recording.replay()
        if context.logits_rows is not None:
            return hidden[context.logits_rows.to(self._device, non_blocking=True)]
        return hidden[: len(token_ids)]

    def _key(self, token_ids: Tensor, context: AttentionContext) -> Key | None:
        if self._dispatcher is None or context.embeds is not None:
            return None
        counts = context.query_start_loc.diff()
        longest = int(counts.max()) if len(counts) else 0
        return self._dispatcher.dispatch(len(token_ids), len(counts), longest)
